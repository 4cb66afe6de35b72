"""GRPO against TRL's GRPOTrainer with its own generation: seconds per step, and time to learn a task.

Both sides have the same checkpoint, prompts, samples per prompt, sampling, reward, learning rates, Adam and
number of updates. Both use all cores: Lockstep with one rank per core, TRL with one process and a thread per
core or with one process per core, whichever is faster in the warm-up.
"""

import itertools
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from tools.bench_tables import peer
from tools.bench_tables.program import CONFIG, CORES, start_lockstep, turn_seconds
from tools.bench_tables.report import ROOT, Row, middle
from tools.bench_tables.sides import BenchFailed, Turn, alternate, torchrun
from tools.bench_tables.tasks import save_task

OURS = "Lockstep"
PHASES = {
    "gen": "generation",
    "old_log_prob": "old log-probs",
    "update_actor": "update",
    "update_weights": "refit",
    "reward": "reward",
}
"""timing_s/<key> -> its name in the table."""
ACCURACY = "val-core/addition/acc/mean@1"
QUICKSTART = ROOT / "configs/quickstart.yaml"
NOTHING_WRITTEN = ("checkpoint.every=0", "checkpoint.export_hf=false", "logging.rollouts=none")


@dataclass(frozen=True)
class Case:
    """One row: a checkpoint, and the step that is measured."""

    size: str
    """Key of tools.bench_tables.tasks.SIZES; empty: the quickstart's model after its warm-up."""
    max_tokens: int
    prompts: int = 16
    updates: int = 1
    mean_length: float = 0.0
    long_share: float = 0.0
    micro_batch: int = 16
    """TRL's micro-batch on one process, in samples; 16 is the fastest of 8 to 64 for the 0.7M row."""
    samples_per_prompt = 8


CASES = {
    "0.7M, 16 x 8, natural lengths up to 256": Case("0.7M", 256, mean_length=57),
    "21M, 16 x 8, natural lengths up to 128": Case("21M", 128, mean_length=81),
    "21M, 16 x 8, up to 256, one long answer of 8": Case("21M", 256, mean_length=30, long_share=1 / 8),
    "quickstart, 128 x 8, 4 updates": Case("", 6, prompts=128, updates=4, micro_batch=256),
}


def add_arguments(add) -> None:
    add("--rows", nargs="+", default=list(CASES), help="prefixes of the names of the rows to measure (all)")
    add("--rounds", type=int, default=5, help="counted steps of each side (5)")
    add("--ranks", type=int, default=CORES, help="ranks of Lockstep (one per core)")
    add("--peer-venv", type=Path, metavar="DIR", help="TRL's virtual environment (WORK/trl)")
    add("--peer-processes", type=int, nargs="+", help="processes of TRL to try (1, and one per core)")
    add("--peer-micro-batch", type=int, help="micro-batch of TRL, in samples (depends on the row)")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of Lockstep's config")


def measure(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return a row per case, and the peer's version."""
    chosen = [name for name in CASES if any(name.startswith(start) for start in args.rows)]
    if not chosen:
        raise BenchFailed(f"--rows={' '.join(args.rows)} matches no row; rows: {'; '.join(CASES)}.")
    python = peer.install(args.peer_venv or work / "trl")
    rows = [
        measure_case(name, CASES[name], args, work, runs / str(number), python)
        for number, name in enumerate(chosen)
    ]
    return rows, {"trl": peer.version(python.parents[1])}


def measure_case(name: str, case: Case, args: Namespace, work: Path, runs: Path, python: Path) -> Row:
    """Return the row of a case. python: the interpreter of the peer's environment."""
    runs.mkdir()
    if case.size:
        chain = dict(mean_length=case.mean_length, long_share=case.long_share)
        task = save_task(runs / "task", case.size, max_length=case.max_tokens, **chain)
        model, reward, config = task / "model", task / "reward.py", CONFIG
        sizes = [
            f"rollout.max_response_tokens={case.max_tokens}",
            f"rollout.cpu_kv_cache_mib={512 if case.size == '21M' else 64}",
        ]
    else:
        quickstart, sizes = prepare_quickstart(work), ["data.val=[]", "validation.every=0", *NOTHING_WRITTEN]
        task, model, config = quickstart / "toy", quickstart / "sft" / "hf", QUICKSTART
        reward = ROOT / "rl/rewards/exact.py"
    steps = args.rounds + 1
    overrides = [
        f"model.path={model}",
        f"data.train=[{task}/train.parquet]",
        f"reward.function={reward}:score",
        f"run.max_steps={steps}",
        "data.shuffle=false",
        "training.optimizer={lr: 1.0e-6, schedule: constant, warmup_steps: 0, beta2: 0.95}",
        "rollout.deterministic=false",
        *sizes,
        *args.set,
    ]
    spec = trl_spec(case, task, model, reward, steps=steps) | {
        "rates": [1e-6],
        "micro_batch": args.peer_micro_batch or case.micro_batch,
    }
    peers = trl_sides(args, python, runs, spec)
    ours = partial(start_lockstep, OURS, runs / "lockstep", args.ranks, overrides, config=config)
    turns = alternate({OURS: ours, **peers}, args.rounds, rivals=list(peers), seconds=turn_seconds)
    theirs = next(side for side in turns if side != OURS)
    return compare(name, theirs, turns)


def compare(name: str, theirs: str, turns: dict[str, list[Turn]]) -> Row:
    """Return the row of two sides."""
    rounds = {side: [turn_seconds(turn) for turn in taken] for side, taken in turns.items()}
    columns: dict[str, float | int | str] = {"rounds": len(rounds[OURS])}
    for side in (theirs, OURS):
        values, records = rounds[side], [record for turn in turns[side] for record in turn]
        phases = {}
        for key, phase in PHASES.items():
            if f"timing_s/{key}" in records[0]:
                phases[phase] = middle([record[f"timing_s/{key}"] for record in records])
        phases["rest"] = middle(values) - sum(phases.values())
        label = "TRL" if side == theirs else side
        columns[f"{label}, s"] = f"{middle(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        columns[f"of {label}"] = ", ".join(f"{phase} {value:.2f}" for phase, value in phases.items())
        lengths = [record["response_length/mean"] for record in records]
        columns[f"mean answer, {label}"] = sum(lengths) / len(lengths)
    columns["TRL runs on"] = theirs.removeprefix("TRL, ")
    return Row(name, columns, middle(rounds[theirs]) / middle(rounds[OURS]), rounds)


# Sides --------------------------------------------------------------------------------------------------


def trl_sides(args: Namespace, python: Path, runs: Path, spec: dict) -> dict:
    """Return a function that starts TRL for each number of processes, by the name of the side."""
    sides = {}
    for processes in args.peer_processes or sorted({1, CORES}):
        directory, threads = runs / f"trl-{processes}", max(1, CORES // processes)
        start = partial(peer.start_trl, python, directory, processes=processes, threads=threads, **spec)
        sides[f"TRL, {processes} x {threads}"] = start
    return sides


def trl_spec(case: Case, task: Path, model: Path, reward: Path, *, steps: int) -> dict:
    """Return the specification of tools/bench_tables/trl_side.py for a case."""
    return {
        "model": model,
        "train": task / "train.parquet",
        "test": task / "test.parquet",
        "reward": reward,
        "steps": steps,
        "steps_per_turn": 1,
        "updates": case.updates,
        "samples": case.prompts * case.samples_per_prompt,
        "samples_per_prompt": case.samples_per_prompt,
        "max_tokens": case.max_tokens,
        "micro_batch": case.micro_batch,
        "beta1": 0.9,
        "beta2": 0.95,
        "shuffle": False,
        "seed": 1,
        "validation_every": 0,
    }


# The quickstart -----------------------------------------------------------------------------------------


def prepare_quickstart(work: Path) -> Path:
    """Make the quickstart's task and its warm-up's checkpoint, unless they exist; return the directory."""
    directory = work / "quickstart"
    if not (directory / "sft" / "hf").exists():
        toy = directory / "toy"
        subprocess.run([sys.executable, "tools/make_toy.py", "--out", toy], cwd=ROOT, check=True)
        overrides = [
            f"model.path={toy}/model",
            f"data.train=[{toy}/train.parquet]",
            f"run.dir={directory}/sft",
        ]
        command = [*torchrun(2), "train_rl.py", "--config", "configs/quickstart_sft.yaml", *overrides]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=sys.stderr)
    return directory


def add_learn_arguments(add) -> None:
    add("--target", type=float, default=0.9, help="held-out accuracy to reach (0.9)")
    add("--ranks", type=int, default=2, help="ranks of Lockstep (2)")
    add("--peer-venv", type=Path, metavar="DIR", help="TRL's virtual environment (WORK/trl)")
    add(
        "--peer-processes",
        type=int,
        nargs=1,
        default=[2],
        help="processes of TRL (2, which is faster than 1)",
    )
    add("--max-steps", type=int, default=150, help="steps of the schedule, a multiple of --every (150)")
    add("--every", type=int, default=25, help="steps between two validations (25)")
    add("--seed", type=int, default=1, help="seed of both sides (1)")


def measure_learning(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return a row with the time of both sides to the target accuracy."""
    from rl.config.schema import Optimizer
    from rl.training.learning_rate import learning_rate

    python = peer.install(args.peer_venv or work / "trl")
    quickstart, every = prepare_quickstart(work), args.every
    config = yaml.safe_load(QUICKSTART.read_text())
    adam = Optimizer(**config["training"]["optimizer"])
    task, model = quickstart / "toy", quickstart / "sft" / "hf"
    reward, steps = ROOT / "rl/rewards/exact.py", args.max_steps
    overrides = [
        f"model.path={model}",
        f"data.train=[{task}/train.parquet]",
        f"data.val=[{task}/test.parquet]",
        f"run.max_steps={steps}",
        f"run.seed={args.seed}",
        f"validation.every={every}",
        *NOTHING_WRITTEN,
    ]
    case = next(case for case in CASES.values() if not case.size)
    spec = trl_spec(case, task, model, reward, steps=steps) | {
        "rates": [learning_rate(adam, step, steps) for step in range(1, steps + 1)],
        "steps_per_turn": every,
        "validation_every": every,
        "shuffle": True,
        "seed": args.seed,
    }
    sides = {
        OURS: partial(
            start_lockstep,
            OURS,
            runs / "lockstep",
            args.ranks,
            overrides,
            config=QUICKSTART,
            steps_per_turn=every,
        ),
        **trl_sides(args, python, runs, spec),
    }

    def enough(turns: dict[str, list[Turn]]) -> bool:
        return all(best_accuracy(taken) >= args.target for taken in turns.values())

    turns = alternate(sides, steps // every, enough=enough, warm_up=0)
    times, columns = {}, {}
    for side, taken in turns.items():
        seconds, accuracies = learning_curve(taken)
        times[side] = time_to(args.target, seconds, accuracies)
        label = OURS if side == OURS else "TRL"
        columns[f"{label}, s"] = times[side]
        columns[f"{label}, accuracy every {every} steps"] = " ".join(f"{value:.3f}" for value in accuracies)
        columns[f"{label}, s of a step"] = middle([turn_seconds(turn) / every for turn in taken])
    theirs = min(time for side, time in times.items() if side != OURS)
    is_reached = max(times.values()) < float("inf")
    row = Row(f"to {args.target:.2f}", columns, theirs / times[OURS] if is_reached else None)
    return [row], {"trl": peer.version(python.parents[1])}


def best_accuracy(turns: list[Turn]) -> float:
    return max((record[ACCURACY] for turn in turns for record in turn if ACCURACY in record), default=0.0)


def learning_curve(turns: list[Turn]) -> tuple[list[float], list[float]]:
    """Return the seconds of training until each validation, and the accuracies."""
    seconds = list(itertools.accumulate(turn_seconds(turn) for turn in turns))
    return seconds, [turn[-1][ACCURACY] for turn in turns]


def time_to(target: float, seconds: list[float], accuracies: list[float]) -> float:
    """Return the seconds until the accuracy reaches the target, interpolated linearly between validations.

    Returns the time of the first validation if it reaches the target, and infinity if none does.
    """
    for k, accuracy in enumerate(accuracies):
        if accuracy >= target:
            if k == 0:
                return seconds[0]
            share = (target - accuracies[k - 1]) / (accuracy - accuracies[k - 1])
            return seconds[k - 1] + share * (seconds[k] - seconds[k - 1])
    return float("inf")
