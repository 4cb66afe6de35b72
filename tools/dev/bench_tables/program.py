"""train_rl.py as a side of a comparison, and comparisons of its configurations in whole steps."""

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.dev.bench_tables.report import ROOT
from tools.dev.bench_tables.sides import STEPS_PER_TURN, Side, Turn, alternate, torchrun
from tools.dev.bench_tables.tasks import SIZES

CONFIG = Path(__file__).with_name("step.yaml")
ALGORITHM = f"algorithm={ROOT}/tools/dev/bench_tables/grpo_in_turns.py"
CORES = len(os.sched_getaffinity(0))


def start_lockstep(
    name: str,
    directory: Path,
    ranks: int,
    overrides: Sequence[str],
    *,
    steps_per_turn: int,
    more: dict[str, str] | None = None,
) -> Side:
    """Start train_rl.py like a user on `ranks` ranks, with GRPO that waits for its turns.

    more: environment variables; without OMP_NUM_THREADS the ranks divide the cores.
    """
    run_dir = directory / "run"
    command = [*torchrun(ranks), "train_rl.py", "--config", str(CONFIG), ALGORITHM, f"run.dir={run_dir}"]
    threads = str(max(1, CORES // ranks))
    environment = {"OMP_NUM_THREADS": threads, STEPS_PER_TURN: str(steps_per_turn)} | (more or {})
    return Side(
        name,
        [*command, *overrides],
        directory=directory / "side",
        records=run_dir / "metrics.jsonl",
        steps_per_turn=steps_per_turn,
        environment=environment,
    )


def of_task(task: Path) -> list[str]:
    """Return the overrides that select a task of tools/dev/bench_tables/tasks.py."""
    return [
        f"model.path={task}/model",
        f"data.train=[{task}/train.parquet]",
        f"reward.function={task}/reward.py:score",
    ]


def run_alone(
    directory: Path, ranks: int, overrides: Sequence[str], rounds: int, more: dict[str, str] | None = None
) -> Turn:
    """Run Lockstep without another side; return the records of all steps but the first."""
    steps = rounds + 1
    overrides = [*overrides, f"run.max_steps={steps}"]
    ours = partial(start_lockstep, "Lockstep", directory, ranks, overrides, steps_per_turn=steps, more=more)
    (turn,) = alternate({"Lockstep": ours}, 1, warm_up=0)["Lockstep"]
    return turn[1:]


def turn_seconds(turn: Turn) -> float:
    """Return the seconds of a turn's steps, without the wait for the turn and without validation."""
    return sum(record["timing_s/step"] - record.get("timing_s/turn", 0.0) for record in turn)


# Configurations of one program ----------------------------------------------------------------------------


def add_step_arguments(add: Callable[..., Any], *, max_tokens: int, steps: int) -> None:
    """Add the arguments of a table that compares configurations."""
    add("--size", choices=SIZES, default="0.7M", help="model (0.7M)")
    add("--prompts", type=int, default=16, help="prompts of a step (16)")
    add("--samples", type=int, default=4, help="samples per prompt (4)")
    add("--max-tokens", type=int, default=max_tokens, help=f"longest answer ({max_tokens})")
    add("--steps", type=int, default=steps, help=f"steps of a turn ({steps})")
    add("--rounds", type=int, default=5, help="counted turns of each side (5)")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of all sides' config")


def compare_configs(
    args: Namespace, task: Path, runs: Path, ranks: int, sides: dict[str, list[str]]
) -> dict[str, list[Turn]]:
    """Run train_rl.py once per side, which names its overrides, and return the turns of each side."""
    common = [
        *of_task(task),
        f"run.max_steps={args.steps * (args.rounds + 1)}",
        f"data.prompts_per_step={args.prompts}",
        f"rollout.samples_per_prompt={args.samples}",
        f"rollout.max_response_tokens={args.max_tokens}",
        *args.set,
    ]
    start: dict[str, Callable[[], Side]] = {
        name: partial(
            start_lockstep, name, runs / f"side-{place}", ranks, [*common, *own], steps_per_turn=args.steps
        )
        for place, (name, own) in enumerate(sides.items())
    }
    return alternate(start, args.rounds)
