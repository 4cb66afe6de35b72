"""Control: time of a step outside generation, forward, backward and refit, and its growth with ranks."""

import json
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tools.dev.bench_tables.program import of_task, run_alone, turn_seconds
from tools.dev.bench_tables.report import ROOT, TableLine, middle
from tools.dev.bench_tables.tasks import SIZES, save_task

if TYPE_CHECKING:
    import torch.distributed as dist

    from rl.data.batch import Batch

T = TypeVar("T")
WORK = ("gen", "old_log_prob", "update_actor", "update_weights")
"""Metrics of generation, passes, optimizer and refit, without timing_s/; "gen" is for example
timing_s/gen."""


def add_arguments(add: Callable[..., Any]) -> None:
    add("--size", choices=SIZES, default="0.7M", help="model of the measured steps (0.7M)")
    add(
        "--ranks", type=int, nargs="*", default=[2, 4], help="numbers of ranks whose steps are measured (2 4)"
    )
    add("--rounds", type=int, default=5, help="counted steps for each number of ranks (5)")
    add(
        "--worlds",
        type=int,
        nargs="*",
        default=[64, 512, 4096],
        help="simulated numbers of ranks, multiples of 32 (64 512 4096)",
    )
    add("--samples-per-rank", type=int, default=8, help="samples per rank of a simulated step (8)")
    add("--mean-tokens", type=int, default=256, help="mean tokens of an answer in a simulated step (256)")
    add(
        "--model", default="qwen2.5-32b", help="NAME in configs/models/ for the simulated refit (qwen2.5-32b)"
    )


def measure(args: Namespace, runs: Path) -> list[TableLine]:
    """Return a row per measured world with control's share of the step, and one per simulated world."""
    rows = [share_of_control(ranks, args, runs / f"{ranks}-ranks") for ranks in args.ranks]
    return rows + [simulated_step(world, args) for world in args.worlds]


def share_of_control(ranks: int, args: Namespace, runs: Path) -> TableLine:
    """Return control's share of the step, from metrics.jsonl of a run on this many ranks."""
    task = save_task(runs / "task", args.size, mean_length=80, max_length=128)
    records = run_alone(runs / "lockstep", ranks, of_task(task), args.rounds)
    shares: dict[str, list[float]] = {}
    for record in records:
        total = turn_seconds([record])
        for key in ("reward", "agreement", "adv"):
            shares.setdefault(key, []).append(record.get(f"timing_s/{key}", 0.0) / total)
        outside = total - sum(record.get(f"timing_s/{key}", 0.0) for key in WORK)
        shares.setdefault("control", []).append(outside / total)
    columns: dict[str, float | int | str] = {
        "s of a step": middle([turn_seconds([record]) for record in records])
    }
    columns |= {f"share of {key}": middle(values) for key, values in shares.items()}
    return TableLine(f"{ranks} ranks on this machine", columns, middle(shares["control"]), shares)


# Simulated worlds ---------------------------------------------------------------------------------------


@contextmanager
def simulated_world(world: int) -> "Iterator[dist.ProcessGroup]":
    """Initialise torch.distributed as rank 0 of a world without the other ranks.

    Collectives of torch's backend `fake` return at once, as if all ranks had sent the same data. Only this
    rank's own work is measured.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore", module=r"torch\.distributed\..*")  # as in a run
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def simulated_step(world: int, args: Namespace) -> TableLine:
    """Return the seconds that one rank spends in the parts of a step that grow with the world.

    Its exchange reads the messages of all ranks and builds the batch.
    """
    import rl.refit.plan  # noqa: F401  its import is not part of the plan
    from rl.config.schema import Config
    from rl.faults.agreement import PhaseAgreement
    from rl.faults.phase_tracker import PhaseEntry
    from rl.phases.batch_metrics import balance_metrics, length_metrics
    from rl.phases.minibatches import MinibatchPlanner
    from rl.rollout.batches import batch_of
    from rl.rollout.samples import pack, unpack
    from rl.runtime.plain_data import decode, encode
    from rl.training.micro_batch_plans import Cost

    group_size, num_samples = 8, world * args.samples_per_rank
    prompts, samples = fake_samples(num_samples, group_size, args.mean_tokens)
    columns: dict[str, float | int | str] = {"samples": num_samples}
    config = Config()
    config.data.prompts_per_step = len(prompts)
    share = args.samples_per_rank
    messages = [encode(pack(samples[at : at + share])) for at in range(0, num_samples, share)]

    def exchanged() -> "Batch":
        found = [unpack(decode(message), rank=rank) for rank, message in enumerate(messages)]
        return batch_of([sample for own in found for sample in own], prompts, samples_per_prompt=group_size)

    with simulated_world(world) as group:
        batch = timed(columns, "exchange, s", exchanged)
        num_tokens = batch.prompt_lengths + batch.lengths
        hashes = timed(columns, "hashes, s", batch.hashes)
        agreement = PhaseAgreement(config, "", group)
        entry = PhaseEntry("update", 1, 1, entered=0.0, limit_s=0.0)
        timed(columns, "agreement, s", lambda: agreement.check(entry, hashes, 0, (0, 0, 0)))
    hf, weights = read_model(args.model)
    planner = MinibatchPlanner(config, world, Cost.of_model(hf, weights), shares_prompts=True)
    plans = timed(columns, "micro-batch plan, s", lambda: planner.plans(batch))
    ranks = [[i for micro in rank for i in micro] for rank in plans[0].micro_batches]

    def metrics() -> dict[str, float]:
        return length_metrics(batch, max_prompt_tokens=16) | balance_metrics(num_tokens.tolist(), ranks)

    timed(columns, "metrics, s", metrics)
    timed(columns, "refit plan, s", lambda: refit_plan(hf, weights, world))
    columns["exchange, MiB"] = sum(map(len, messages)) / 2**20
    most = float(max(columns["micro-batch plan, s"], columns["refit plan, s"]))  # type: ignore[type-var]
    return TableLine(f"{world} simulated ranks, seconds of the longest plan", columns, most)


def timed(columns: dict, name: str, function: Callable[[], T]) -> T:
    """Call the function, store its seconds as columns[name], and return its result."""
    start = time.perf_counter()
    out = function()
    columns[name] = time.perf_counter() - start
    return out


def fake_samples(num_samples: int, group_size: int, mean_tokens: int) -> tuple[list[np.ndarray], list]:
    """Return prompts and samples of random tokens, with geometric lengths."""
    from rl.rollout.samples import Sample, Segment

    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / mean_tokens, num_samples).clip(max=8 * mean_tokens)
    prompts = [rng.integers(6, 102, 64).astype(np.int32) for _ in range(num_samples // group_size)]
    samples = []
    for place, length in enumerate(lengths):
        prompt, number = divmod(place, group_size)
        token_ids = rng.integers(6, 102, length).astype(np.int32)
        segment = Segment(token_ids, np.zeros(length, np.float32), np.zeros(length, np.int32))
        samples.append(Sample(prompt, number, (segment,)))
    return prompts, samples


def read_model(name: str) -> tuple[dict, list]:
    """Return the config.json of configs/models/NAME and the model's weights."""
    from rl.models import architecture

    hf = json.loads((ROOT / "configs" / "models" / name / "config.json").read_text())
    return hf, architecture(hf).weights(hf)


def refit_plan(hf: dict, weights: list, world: int) -> None:
    """Compute the plan of rank 0's refit from tp 8, pp 4 to tp 8, on nodes of 8 ranks."""
    from rl.models.placement import RolloutPlacement, TrainingPlacement, count_experts
    from rl.refit.plan import Routing, cut_into_batches, plan_of

    layers, experts = hf["num_hidden_layers"], count_experts(weights)
    training = TrainingPlacement(world, 8, 4, layers, etp=1 if experts else None, num_experts=experts)
    rollout = RolloutPlacement(world, 8, layers)
    routing = Routing(weights, training, rollout, node_of=lambda rank: rank // 8, itemsize=2)
    plan_of(routing, cut_into_batches(routing, 512 << 20), 0)
