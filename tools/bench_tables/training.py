"""Training: packed against padded rows, the share of the matrix rate, and the memory of each phase."""

import time
from argparse import Namespace
from pathlib import Path

import numpy as np

from tools.bench_tables import grpo
from tools.bench_tables.report import Row, middle
from tools.bench_tables.sides import on_ranks
from tools.bench_tables.tasks import SIZES, save_task


def add_packing_arguments(add) -> None:
    add("--sizes", nargs="+", choices=SIZES, default=["0.7M", "21M"], help="models (0.7M 21M)")
    add("--samples", type=int, default=32, help="samples of an update (32)")
    add("--max-tokens", type=int, default=256, help="longest sample; the mean is a quarter of it (256)")
    add("--rounds", type=int, default=5, help="counted updates of each form (5)")
    add("--ranks", type=int, default=2, help="ranks, of one thread each (2)")


def measure_packing(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return a row per model: seconds of an update on packed and on padded samples of the same tokens."""
    rows = []
    for size in args.sizes:
        task = save_task(runs / size, size, mean_length=args.max_tokens / 4, max_length=args.max_tokens)
        found = on_ranks(
            "training:update_both_forms",
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

    from rl.data.batch import given_responses
    from rl.objectives.aggregate import aggregate

    engine, planner = _trainer(device, model, num_samples)
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


def _trainer(device, model: str, num_prompts: int):
    """Return a float32 policy that learns with a rate of 0, and the planner of one mini-batch."""
    from rl.config.schema import Config, Optimizer
    from rl.models import read_hf_config
    from rl.phases.minibatches import MinibatchPlanner
    from rl.training.engine import TrainingEngine
    from rl.training.grid import build_grid
    from rl.training.micro_batch_plans import Cost
    from rl.training.spec import ModelSpec

    grid, config = build_grid(tp=1, pp=1, seed=1), Config()
    config.data.prompts_per_step = num_prompts
    spec = ModelSpec(model, read_hf_config(model), "float32", optimizer=Optimizer(lr=0.0))
    engine = TrainingEngine(spec, config.training, grid, device)
    weights = engine.weight_map
    cost = Cost.of_model(weights.hf, weights.weights)
    return engine, MinibatchPlanner(config, grid.dp, cost, shares_prompts=engine.shares_prompts)


# Share of the matrix rate ---------------------------------------------------------------------------------

PRODUCT = (8192, 512, 1024)
"""Rows, inner size and columns of the matrix product whose rate is the reference."""


def add_rate_arguments(add) -> None:
    add("--size", choices=SIZES, default="21M", help="model (21M)")
    add("--groups", type=int, default=16, help="groups of 8 answers to a prompt of 8 tokens (16)")
    add("--mean-length", type=int, default=81, help="mean tokens of an answer, of at most 128 (81)")
    add("--rounds", type=int, default=5, help="counted passes of each kind (5)")


def measure_rate(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return a row for an update and one for a log-prob pass, on one rank with one thread."""
    task = save_task(runs / "task", args.size, mean_length=args.mean_length, max_length=128)
    found = on_ranks(
        "training:passes_and_products",
        1,
        runs / "rank",
        model=str(task / "model"),
        num_groups=args.groups,
        mean_length=args.mean_length,
        rounds=args.rounds,
    )
    rate = middle(found["product"])
    rows = []
    for name, operations in found["operations"].items():
        seconds = middle(found[name])
        columns = {
            "CPU s": seconds,
            "GFLOP": operations / 1e9,
            "GFLOP/s": operations / seconds / 1e9,
            "GFLOP/s of a matrix product": rate / 1e9,
        }
        rows.append(Row(f"{name}, {args.size}", columns, operations / seconds / rate, {"CPU s": found[name]}))
    return rows, {}


def passes_and_products(device, *, model: str, num_groups: int, mean_length: int, rounds: int) -> dict:
    """Return CPU seconds of updates and log-prob passes, and rates of a matrix product, in turn.

    The operations of a forward pass are those of its matrix products and of attention
    (`rl.training.micro_batch_plans.Cost`), of which the plan has the sum. An update counts three times as
    many, so that work done twice is not counted.
    """
    import torch

    from rl.data.batch import Batch

    engine, planner = _trainer(device, model, num_groups)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma(2.0, mean_length / 2, 8 * num_groups).astype(int), 4, 128)
    prompts = [rng.integers(6, 102, 8).astype(np.int32) for _ in range(num_groups)]
    batch = Batch(
        prompt_ids=[prompts[i // 8] for i in range(len(lengths))],
        response_ids=[rng.integers(6, 102, length).astype(np.int32) for length in lengths],
        groups=torch.arange(len(lengths)) // 8,
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )
    plan = planner.plans(batch)[0]
    assert plan.costs is not None
    forward = sum(map(sum, plan.costs))
    num_tokens = float(lengths.sum())

    def loss(micro):
        return -micro.logprobs.sum() / num_tokens, {}

    m, k, n = PRODUCT
    left, right, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)

    def product():
        torch.mm(left, right, out=out)

    def log_probs():
        engine.forward(batch, [plan.micro_batches], ("logprobs",))

    def update():
        engine.update(batch, plan.micro_batches, loss, lr=0.0, outputs=("logprobs",))

    seconds: dict[str, list[float]] = {"update": [], "log-probs": [], "product": []}
    for turn in range(rounds + 1):
        for name, work in (("update", update), ("log-probs", log_probs), ("product", product)):
            start = time.process_time()
            work()
            if turn > 0:
                seconds[name].append(time.process_time() - start)
    rates = [2 * m * k * n / spent for spent in seconds.pop("product")]
    return seconds | {"product": rates, "operations": {"update": 3 * forward, "log-probs": forward}}


# Memory -------------------------------------------------------------------------------------------------


def add_memory_arguments(add) -> None:
    add("--size", choices=SIZES, default="21M", help="model (21M)")
    add("--max-tokens", type=int, default=64, help="longest answer (64)")
    add("--rounds", type=int, default=3, help="counted steps (3)")
    add("--ranks", type=int, default=2, help="ranks (2)")


def measure_memory(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return the peak memory of rank 0 in each phase of a GRPO step, as medians of the steps."""
    case = grpo.Case(args.size, args.max_tokens, prompts=8, mean_length=0.63 * args.max_tokens)
    task = save_task(runs / "task", args.size, mean_length=case.mean_length, max_length=args.max_tokens)
    config = grpo.write_config(runs, case)
    records = grpo.run_alone(runs / "lockstep", config, task, args.ranks, args.rounds)
    rows = []
    for phase in ("refit", "generate", "score", "log_probs", "update"):
        columns: dict[str, float | int | str] = {}
        for kind in ("host", "device"):
            found = [r[f"memory_gib/{kind}/{phase}"] for r in records if f"memory_gib/{kind}/{phase}" in r]
            if found:
                columns[f"{kind}, GiB"] = middle(found)
        if columns:
            rows.append(Row(phase, columns, float(list(columns.values())[-1])))
    return rows, {}
