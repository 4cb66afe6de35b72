"""An update on packed against padded samples."""

import time
from argparse import Namespace
from pathlib import Path

import numpy as np

from tools.bench_tables.report import Row, middle
from tools.bench_tables.sides import on_ranks
from tools.bench_tables.tasks import SIZES, save_task


def add_arguments(add) -> None:
    add("--sizes", nargs="+", choices=SIZES, default=["0.7M", "21M"], help="models (0.7M 21M)")
    add("--samples", type=int, default=32, help="samples of an update (32)")
    add("--max-tokens", type=int, default=256, help="longest sample; the mean is a quarter of it (256)")
    add("--rounds", type=int, default=5, help="counted updates of each form (5)")
    add("--ranks", type=int, default=2, help="ranks, of one thread each (2)")


def measure(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return a row per model: seconds of an update on packed and on padded samples of the same tokens."""
    rows = []
    for size in args.sizes:
        task = save_task(runs / size, size, mean_length=args.max_tokens / 4, max_length=args.max_tokens)
        found = on_ranks(
            "packing:update_both_forms",
            args.ranks,
            runs / f"{size}-ranks",
            model=str(task / "model"),
            num_samples=args.samples,
            max_tokens=args.max_tokens,
            rounds=args.rounds,
        )
        rounds = {form: found[form] for form in ("packed", "padded")}
        packed, padded = middle(rounds["packed"]), middle(rounds["padded"])
        columns = {"packed, s": packed, "padded, s": padded, "padded / real tokens": found["token_ratio"]}
        rows.append(
            Row(f"{size}, {args.samples} samples up to {args.max_tokens}", columns, padded / packed, rounds)
        )
    return rows, {}


def update_both_forms(device, *, model: str, num_samples: int, max_tokens: int, rounds: int) -> dict:
    """Return the seconds of updates on packed and padded samples, in turn. Collective over the world.

    In the padded form each sample is followed by tokens with mask 0 up to the longest sample, as in a trainer
    without packing. Raises AssertionError if the gradient norms of the two differ.
    """
    import torch
    import torch.distributed as dist

    from rl.config.schema import Config, Model
    from rl.data.batch import given_responses
    from rl.engines.engines import build_policy
    from rl.models import read_hf_config
    from rl.objectives.aggregate import aggregate
    from rl.phases.minibatches import MinibatchPlanner
    from rl.training.grid import build_grid
    from rl.training.micro_batch_plans import Cost

    grid, config = build_grid(tp=1, pp=1, seed=1), Config(model=Model(path=model, dtype="float32"))
    config.data.prompts_per_step = num_samples
    engine = build_policy(config, read_hf_config(model), grid, device)
    cost = Cost.of_model(engine.weight_map.hf, engine.weight_map.weights)
    planner = MinibatchPlanner(config, grid.dp, cost, shares_prompts=engine.shares_prompts)
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(4 / max_tokens, num_samples) + 1, max_tokens - 8)
    lengths[0] = max_tokens - 8
    prompts = [rng.integers(6, 102, 8).astype(np.int32) for _ in lengths]
    answers = [rng.integers(6, 102, length).astype(np.int32) for length in lengths]
    rest = [np.full(max(lengths) - length, 6, np.int32) for length in lengths]
    batches = {
        "packed": given_responses(prompts, answers),
        "padded": given_responses(prompts, [np.concatenate(pair) for pair in zip(answers, rest)]),
    }
    batches["padded"].mask = torch.cat(
        [torch.cat([torch.ones(len(a)), torch.zeros(len(r))]) for a, r in zip(answers, rest)]
    )

    def loss(micro):
        total = aggregate(
            -micro.logprobs,
            micro.mask,
            micro.lengths,
            "token-mean",
            num_tokens=float(lengths.sum()),
            num_samples=float(num_samples),
        )
        return total, {"loss": total}

    plans = {form: planner.plans(batch)[0].micro_batches for form, batch in batches.items()}
    seconds: dict[str, list[float]] = {"packed": [], "padded": []}
    norms = {}
    for turn in range(rounds + 1):
        for form, batch in batches.items():
            dist.barrier()
            start = time.perf_counter()
            norms[form] = engine.update(batch, plans[form], loss, lr=0.0, outputs=("logprobs",)).grad_norm
            dist.barrier()
            if turn > 0:
                seconds[form].append(time.perf_counter() - start)
    assert abs(norms["packed"] / norms["padded"] - 1) < 1e-3, norms
    tokens = {form: int((b.lengths + b.prompt_lengths).sum()) for form, b in batches.items()}
    return seconds | {"token_ratio": tokens["padded"] / tokens["packed"]}
