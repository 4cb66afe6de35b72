"""Gradients of a policy with router replay, and with routers that are fixed by hand to the same experts."""

import numpy as np
import torch

from rl.runtime.collectives import gather_objects
from rl.training.packing import lay_out
from rl.training.parts import TrainerParts


def routers_of(trainer) -> list:
    return [layer.mlp.router for layer in trainer.model.decoder.layers if hasattr(layer.mlp, "router")]


def use_other_experts(batch, num_experts: int) -> None:
    """Replace the experts of a batch by others, which no router would choose.

    Else a replay that does nothing would not be seen.
    """
    column = batch.held["routes"]
    for i, row in column.rows.items():
        column.rows[i] = row._replace(values=(row.values + 1) % num_experts)


def loss(micro):
    return -(micro.logprobs * micro.column("rollout_logprobs")).sum(), {}


def gradient(trainer, batch, plan) -> dict[str, torch.Tensor]:
    """Return this rank's gradient of each weight."""
    for chunk in trainer.wrapped:
        chunk.zero_grad_buffer()
    trainer._run(batch, plan, loss, forward_only=False, progress=None)
    return {name: p.main_grad.clone() for name, p in trainer.model.named_parameters()}


class FixedByHand:
    """Gives a router the experts of one micro-batch after the other."""

    def __init__(self, experts: list[torch.Tensor]):
        self.experts = iter(experts)

    def get_replay_topk(self, scores, topk, num_groups, group_topk, default):
        own, given = default(scores, topk, num_groups, group_topk)[1], next(self.experts)
        chosen = torch.where(given < 0, own, given)
        return scores.gather(1, chosen), chosen


def gradient_by_hand(trainer, batch, plan) -> dict[str, torch.Tensor]:
    """The same without recomputation, by routers that know nothing of replay."""
    grid, rows = trainer.grid, []
    for samples in plan[grid.dp_rank] if routers_of(trainer) else []:
        row = lay_out(batch, samples, multiple=grid.tp, device=torch.device("cpu"))
        values = batch.held["routes"].of(samples)
        experts = torch.full((row.tokens.numel(), *values.shape[1:]), -1)
        for i, start in zip(samples, row.starts[0]):
            own = batch.held["routes"].local[i].astype(np.int64)
            experts[start : start + len(own)] = torch.from_numpy(own)
        rows.append(experts.chunk(grid.tp)[grid.tp_rank])
    parts, trainer.parts = trainer.parts, TrainerParts()
    config, hooks = trainer.model.config, [router.router_replay for router in routers_of(trainer)]
    recompute, config.recompute_granularity = config.recompute_granularity, None
    for k, router in enumerate(routers_of(trainer)):
        router.router_replay = FixedByHand([row[:, k] for row in rows])
    found = gradient(trainer, batch, plan)
    config.recompute_granularity = recompute
    for hook, router in zip(hooks, routers_of(trainer)):
        router.router_replay = hook
    trainer.parts = parts
    return found


def worst(found: dict, expected: dict) -> float:
    """Return the largest difference of a weight's gradient on this rank, relative to the whole gradient."""
    norm = sum(gather_objects(sum(float(g.square().sum()) for g in expected.values()))) ** 0.5
    return max(float((found[name] - g).norm() / norm) for name, g in expected.items())
