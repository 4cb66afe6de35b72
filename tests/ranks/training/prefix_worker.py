"""One rank of test_shared_prefix.py: gradients with and without shared prompts.

    prefix_worker.py OUT_DIR NAME=CHECKPOINT:TPxPP[:OPTION,...] [...]

OPTION: values (a value model), plain (no sequence parallelism), losses (every policy loss and pairs).
Rank r saves {NAME: {loss: figures}} to OUT_DIR/r.json; on the last pipeline stage also the tokens and
FLOPs of the rows, and the outputs.
"""

import json
import sys
from pathlib import Path

from megatron_groups import RANKS, new_grid  # isort: skip

from dataclasses import replace
from functools import partial

import torch
from gradient_worker import config_of
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from rl.algorithms import dpo
from rl.config.objective import LOSSES
from rl.config.schema import Optimizer
from rl.data.batch import Batch
from rl.models import read_hf_config
from rl.phases.policy_gradient import policy_loss
from rl.runtime.session import session
from rl.training.engine import TrainingEngine
from rl.training.loss import Totals
from rl.training.spec import ModelSpec

GROUPS = [(30, (5, 9, 0, 12)), (70, (20, 31, 31)), (7, (20,)), (40, (3, 90))]
"""(tokens of the prompt, tokens of each response): a group that is one masked block, groups that are not, an
empty response, and a single sample."""
EQUAL = [(64, (64,) * 16)]


def batch_of(groups, vocab_size: int) -> Batch:
    generator = torch.Generator().manual_seed(5)

    def tokens(length):
        return torch.randint(3, vocab_size, (length,), generator=generator).int().numpy()

    prompts = [tokens(length) for length, _ in groups]
    batch = Batch(
        prompt_ids=[prompts[k].copy() for k, (_, lengths) in enumerate(groups) for _ in lengths],
        response_ids=[tokens(length) for _, lengths in groups for length in lengths],
        groups=torch.tensor([k for k, (_, lengths) in enumerate(groups) for _ in lengths]),
        truncated=torch.zeros(sum(len(lengths) for _, lengths in groups), dtype=torch.bool),
    )
    total = len(batch.mask)
    batch.mask = (torch.rand(total, generator=generator) > 0.2).float()
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        setattr(batch, name, -4.5 + torch.randn(total, generator=generator) * 0.3)
    batch.advantages, batch.extra["old_values"], batch.extra["returns"] = torch.randn(
        3, total, generator=generator
    )
    batch.extra["selected_tokens"] = (torch.rand(total, generator=generator) > 0.5).float()
    batch.extra["loss_weights"] = torch.rand(total, generator=generator)
    return batch


def gradients(trainer: TrainingEngine, batch: Batch, plan, loss, share: bool):
    """Return the gradients of this rank, the outputs in sample order, and figures of the rows."""
    trainer.shares_prompts = share
    for chunk in trainer.wrapped:
        chunk.zero_grad_buffer()
    outputs = torch.zeros(len(batch.mask))
    figures = {"tokens": 0}

    def consume(micro):
        outputs[micro.column_index] = micro.output(trainer.model.outputs[0]).detach()
        figures["tokens"] += micro.tokens.numel()
        return loss(micro)[0], {}

    # FlopCounterMode does not count the attention for CPU.
    shapes = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
            q, k, v
        ),
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
            sdpa_backward_flop_count(g, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=shapes) as flops:
        trainer._run(batch, plan, consume, forward_only=False, progress=None)
    figures["flops"] = flops.get_total_flops()
    return {name: p.main_grad.clone() for name, p in trainer.model.named_parameters()}, outputs, figures


def compare(trainer: TrainingEngine, batch: Batch, plan, loss) -> dict:
    plain, plain_outputs, plain_figures = gradients(trainer, batch, plan, loss, False)
    shared, outputs, figures = gradients(trainer, batch, plan, loss, True)
    norm = torch.stack([g.norm() for g in plain.values()]).norm()
    worst = max((float((shared[n] - g).norm() / norm), n) for n, g in plain.items())
    return {
        "gradient": worst[0],
        "worst": worst[1],
        "norm": float(norm),
        "outputs": float((outputs - plain_outputs).abs().max()),
        "plain": plain_figures,
        "shared": figures,
    }


def losses_of(config, values: bool):
    """Yield (name, loss of a micro-batch without totals)."""
    if values:
        yield (
            "values",
            lambda micro, totals: ((micro.values * micro.column("returns")).sum() / totals.num_tokens, {}),
        )
        return
    for name in LOSSES:
        yield name, policy_loss(replace(config, objective=replace(config.objective, loss=name)))


def run_case(how: str, device) -> dict:
    checkpoint, layout, *options = how.split(":")
    options = options[0].split(",") if options else []
    tp, pp = map(int, layout.split("x"))
    config = config_of(checkpoint, tp, pp, 4096)
    hf = read_hf_config(checkpoint)
    training = replace(config.training, sequence_parallel="plain" not in options)
    spec = ModelSpec(checkpoint, hf, "float32", has_values="values" in options, optimizer=Optimizer())
    trainer = TrainingEngine(spec, training, new_grid(tp, pp), device)
    found = {}
    batch = batch_of(GROUPS, hf["vocab_size"])
    count = len(batch)
    totals = Totals(num_tokens=float(batch.mask.sum()), num_samples=float(count), num_units=float(count))
    for k, (name, loss) in enumerate(losses_of(config, "values" in options)):
        if k and "losses" not in options:
            break
        plan = [[list(range(count))]] if k % 2 == 0 else [[[0, 1, 2], list(range(3, count))]]
        found[name] = compare(trainer, batch, plan, partial(loss, totals=totals))
    if "losses" in options:
        pairs = batch_of([(30, (5, 9)), (100, (40, 61))], hf["vocab_size"])
        loss = partial(dpo.loss, totals=replace(totals, num_units=2.0), config=config)
        found["pairs"] = compare(trainer, pairs, [[[0, 1, 2, 3]]], loss)
        equal = batch_of(EQUAL, hf["vocab_size"])
        loss = partial(policy_loss(config), totals=totals)
        found["equal"] = compare(trainer, equal, [[list(range(16))]], loss)
        singles = batch_of([(9, (4,)), (9, (4,)), (30, (5,))], hf["vocab_size"])
        found["singles"] = compare(trainer, singles, [[[0, 1, 2]]], loss)
    return found


def main(out_dir: str, *cases: str) -> None:
    found = {}
    with session(RANKS) as device:
        for case in cases:
            name, _, how = case.partition("=")
            found[name] = run_case(how, device)
    Path(out_dir, f"{RANKS.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
