"""One rank of test_router_replay.py: replays the engine's routes in the trainer, in several layouts.

    replay_worker.py CHECKPOINT DTYPE OUT_DIR ENGINE LAYOUT [LAYOUT ...]

ENGINE is TPxEP, with data parallel attention if EP is larger (for example 1x2). LAYOUT is TPxPPxEP. Rank r
writes its figures by layout to OUT_DIR/r.json.
"""

import json
import sys
from pathlib import Path

from megatron_groups import RANKS, new_grid  # isort: skip

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from rl.config.schema import Config, Data, Model, Rollout, Training, resolve
from rl.engines import rollout_engines
from rl.engines.engines import build_policy
from rl.features.router_replay.engine import RouteCollector
from rl.features.router_replay.trainer import RouterReplay
from rl.models import read_hf_config
from rl.rollout.batches import batch_of
from rl.rollout.engine import RolloutEngine
from rl.rollout.exchange import exchange
from rl.rollout.sampling import Sampling
from rl.rollout.vllm_model import ServedModel
from rl.runtime.collectives import gather_objects
from rl.runtime.session import session
from rl.training.held_transfer import KEY
from rl.training.micro_batch_plans import plan_minibatch
from tests.ranks.training.fixed_routers import (
    gradient,
    gradient_by_hand,
    loss,
    routers_of,
    use_other_experts,
    worst,
)

SAMPLING = Sampling(3, 9)
IDS = np.arange(6, 102, dtype=np.int32).repeat(2)
PROMPTS = [np.roll(IDS, 7 * i)[:length] for i, length in enumerate((150, 4, 20, 180, 11, 7))]
"""The long ones fill a block of 128 tokens of the KV cache, which their samples share."""
CHUNK = 70
"""Tokens that the engine computes in a step, so that the long prompts come in several chunks."""


def config_of(checkpoint: str, dtype: str, layout: str, replay: str, recompute: str = "none") -> Config:
    tp, pp, ep = map(int, layout.split("x"))
    grid = Training(tp=tp, pp=pp, ep=ep, micro_batch_tokens=230, router_replay=replay, recompute=recompute)
    return resolve(
        Config(model=Model(path=checkpoint, dtype=dtype), data=Data(max_prompt_tokens=200), training=grid)
    )


def grid_of(config: Config):
    training = config.training
    return new_grid(training.tp, training.pp, training.ep, training.expert_tp)


@contextmanager
def choices(trainer):
    """Yield a list that receives (layer, map of tokens to experts, routes) at each call of a router."""
    calls: list = []
    hooks = [
        router.register_forward_hook(
            lambda module, _, out, k=k: calls.append((k, out[1], module.router_replay.routes))
        )
        for k, router in enumerate(routers_of(trainer))
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def share_of_others(calls: list) -> float:
    """Return the share of (token, layer) pairs with another expert in the router than in the engine."""
    different = total = 0
    for layer, used, routes in calls:
        engines = torch.zeros_like(used).scatter(1, routes.experts[layer].long(), True)
        given = routes.given.expand(len(used), 1)[:, 0]
        different += int((used != engines).any(-1)[given].sum())
        total += int(given.sum())
    return different / max(total, 1)


def expected_bytes(batch, plan, trainer) -> int:
    """Bytes of routes that this rank should receive: its stage's layers of the samples it trains on."""
    column, layers = batch.held["routes"], trainer.parts.get(RouterReplay).need(trainer.grid.pp_rank)
    if layers is None:
        return 0
    size = len(layers) * column.shape[1]
    mine = [i for micro in plan[trainer.grid.dp_rank] for i in micro]
    total = batch.prompt_lengths + batch.lengths - 1
    return sum(int(total[i]) * size + KEY.itemsize for i in mine if int(column.holders[i]) != RANKS.rank)


def run_layout(checkpoint, dtype, layout, hf, batch, device) -> dict:
    config = config_of(checkpoint, dtype, layout, "engine", recompute="full" if layout[2] == "2" else "none")
    trainer = build_policy(config, hf, grid_of(config), device)
    everything = list(range(len(batch)))
    plan = plan_minibatch(batch, everything, dp=trainer.grid.dp, max_tokens=230)
    assert min(len(rank) for rank in plan) > 1
    with choices(trainer) as calls:
        trainer.forward(batch, [plan], ("logprobs",))
    moved = trainer.parts.get(RouterReplay).moved
    found = {"received": moved.received, "planned": moved.planned}
    found["expected"] = expected_bytes(batch, plan, trainer)
    metrics = trainer.parts.metrics(device.torch)
    found |= {"without": metrics["training/router_mismatch"], "with": share_of_others(calls)}
    if dtype == "float32":
        other = batch.select(everything)
        use_other_experts(other, trainer.model.config.num_moe_experts)
        with choices(trainer) as calls:
            replayed = gradient(trainer, other, plan)
        found |= {"calls": len(calls), "with others": share_of_others(calls)}
        trainer.shares_prompts = False
        by_hand = gradient_by_hand(trainer, other, plan)
        found |= {
            "shared": worst(replayed, by_hand),
            "gradient": worst(gradient(trainer, other, plan), by_hand),
        }
        trainer.shares_prompts = True
        found["without replay"] = worst(replayed, gradient(trainer, batch, plan))
        found["old_policy"] = run_old_policy(checkpoint, layout, hf, batch, plan, device)
    return found


def run_old_policy(checkpoint, layout, hf, batch, plan, device) -> dict:
    """Replay the first pass after the weights have changed: by an update, which also recomputes layers."""
    config = config_of(
        checkpoint, "float32", layout, "old_policy", recompute="full" if layout[2] == "2" else "none"
    )
    trainer = build_policy(config, hf, grid_of(config), device)
    bare = replace(batch, held={})
    maps = []
    for lr in (0.05, 0.0):
        with choices(trainer) as calls:
            trainer.update(bare, plan, loss, lr=lr)
        maps.append([(layer, used) for layer, used, _ in calls])
    with choices(trainer) as calls:
        trainer.forward(replace(batch, held={}), [plan], ("logprobs",))
    fresh = [(layer, used) for layer, used, _ in calls]
    per_layer = lambda found: {  # noqa: E731
        k: [used for layer, used in found if layer == k] for k in {layer for layer, _ in found}
    }
    first, second, third = map(per_layer, (*maps, fresh))
    has = lambda layer, map: any(torch.equal(map, other) for other in first[layer])  # noqa: E731
    same = all(has(layer, used) for layer, all_used in second.items() for used in all_used)
    would_differ = sum(not has(layer, used) for layer, all_used in third.items() for used in all_used)
    return {"replayed": same, "micro-batches that would differ": would_differ}


def main(checkpoint: str, dtype: str, out_dir: str, engine_layout: str, *layouts: str) -> None:
    results = {}
    with session(RANKS) as device:
        hf = read_hf_config(checkpoint)
        tp, ep = map(int, engine_layout.split("x"))
        rollout = Rollout(tp=tp, ep=ep, dp_attention=ep > tp, max_concurrent_samples=4, cpu_kv_cache_mib=16)
        parts = [*rollout_engines.model_parts(rollout, hf), RouteCollector()]
        model = ServedModel(checkpoint, dtype, max_tokens=256, frozen=True)
        engine = RolloutEngine(model, rollout, seed=1, device=device, parts=parts)
        if engine.scheduler.scheduler_config.enable_chunked_prefill:  # not with DeepSeek's attention on CPU
            engine.scheduler.max_num_scheduled_tokens = CHUNK
        drawn = engine.generate(PROMPTS, SAMPLING, list(range(len(PROMPTS))))
        mine = drawn if engine.leads else []
        batch = batch_of(exchange(mine, device), PROMPTS, samples_per_prompt=SAMPLING.samples_per_prompt)
        for layout in layouts:
            fresh = batch.select(list(range(len(batch))))
            results[layout] = run_layout(checkpoint, dtype, layout, hf, fresh, device)
        gather_objects(None)
    Path(out_dir, f"{RANKS.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
