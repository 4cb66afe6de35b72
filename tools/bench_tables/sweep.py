"""A sweep in one job against the same points alone: core-seconds, and whether the metrics are equal."""

import itertools
import json
import resource
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rl.config.point_names import name_of, short_names
from tools.bench_tables.program import CONFIG, of_task
from tools.bench_tables.report import Row
from tools.bench_tables.sides import ROOT, BenchFailed, end_of, torchrun
from tools.bench_tables.tasks import SIZES, save_task
from tools.records import comparable

POINTS = (
    "adapter={kind: lora, in_engine: adapter}",
    "rollout={samples_per_prompt: 4, max_response_tokens: 8, deterministic: true}",
)
"""Overrides of all points."""
LR, SEED, RANK, ALGORITHM = "training.optimizer.lr", "run.seed", "adapter.rank", "algorithm"


def add_arguments(add) -> None:
    add("--size", choices=SIZES, default="0.7M", help="model (0.7M)")
    add("--points", type=int, default=16, help="points of the sweep, at most 16 (16)")
    add("--ranks", type=int, default=2, help="ranks of each job (2)")
    add("--steps", type=int, default=20, help="steps of each point (20)")
    add("--prompts", type=int, default=16, help="prompts of a step (16)")


def measure(args: Namespace, runs: Path) -> list[Row]:
    """Return one row: user and system seconds of all processes on both sides."""
    task = save_task(runs / "task", args.size, mean_length=4, max_length=8)
    common = [*of_task(task), f"run.max_steps={args.steps}", f"data.prompts_per_step={args.prompts}", *POINTS]
    values = itertools.product((5e-4, 2e-3), (1, 2), (4, 8), ("grpo", "rloo"))
    points = [dict(zip((LR, SEED, RANK, ALGORITHM), some)) for some in values][: args.points]
    joint = run_seconds(args.ranks, runs / "joint", [*common, f"sweep.adapters={json.dumps(points)}"])
    alone, equal, largest = 0.0, 0, 0.0
    for number, point in enumerate(points):
        directory = runs / f"alone-{number}"
        own_keys = [f"{key}={value}" for key, value in point.items()]
        alone += run_seconds(args.ranks, directory, [*common, *own_keys])
        own = runs / "joint" / name_of(point, short_names(list(point)))
        differences = [
            abs(one[name] - other[name])
            for one, other in zip(comparable(directory), comparable(own), strict=True)
            for name in one
        ]
        equal += not any(differences)
        largest = max(largest, *differences)
    columns: dict[str, float | int | str] = {
        "one job, core-seconds": joint,
        "alone, core-seconds": alone,
        "points with equal metrics": f"{equal} of {len(points)}",
        "largest difference": largest,
    }
    return [Row(f"{len(points)} points, {args.ranks} ranks, {args.steps} steps", columns, joint / alone)]


def run_seconds(ranks: int, directory: Path, overrides: Sequence[str]) -> float:
    """Run train_rl.py; return the user and system seconds of its processes. Raises BenchFailed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [*torchrun(ranks), "train_rl.py", "--config", str(CONFIG), f"run.dir={directory}", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise BenchFailed(f"{' '.join(overrides)} failed:\n{end_of(done.stderr)}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
