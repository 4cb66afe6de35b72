"""Carry-over against synchronous steps on the same ranks, with log-normal response lengths (sigma 1)."""

from argparse import Namespace
from functools import partial
from pathlib import Path

import yaml

from tools.bench_tables.grpo import NO_VALIDATION, start_ours, turn_seconds
from tools.bench_tables.report import Row, middle
from tools.bench_tables.sides import Turn, alternate
from tools.bench_tables.tasks import SIZES, save_task

SYNCHRONOUS, CARRIED = "synchronous", "carry-over"


def add_arguments(add) -> None:
    add("--size", choices=SIZES, default="0.7M", help="model (0.7M)")
    add("--prompts", type=int, default=16, help="prompts of a step (16)")
    add("--samples", type=int, default=4, help="samples per prompt (4)")
    add("--median", type=int, default=40, help="median answer in tokens (40)")
    add("--max-tokens", type=int, default=600, help="longest answer (600)")
    add("--steps", type=int, default=5, help="steps of a turn (5)")
    add("--rounds", type=int, default=5, help="counted turns of each side (5)")
    add("--ranks", type=int, default=2, help="ranks of each side (2)")
    add("--staleness", type=int, nargs="+", default=[1, 2], help="values of rollout.max_staleness (1 2)")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of both sides' config")


def measure(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return a row per limit of staleness: tokens per second of both sides, in whole steps and generation."""
    task = save_task(
        runs / "task", args.size, mean_length=args.median, max_length=args.max_tokens, is_log_normal=True
    )
    config = write_config(runs, args)
    fixed = [
        f"model.path={task}/model",
        f"data.train=[{task}/train.parquet]",
        f"reward.function={task}/reward.py:score",
        f"run.max_steps={args.steps * (args.rounds + 1)}",
        *NO_VALIDATION,
        *args.set,
    ]
    sides = {SYNCHRONOUS: []} | {
        f"{CARRIED}, max_staleness {limit}": ["rollout.carry_over=true", f"rollout.max_staleness={limit}"]
        for limit in args.staleness
    }
    start = {
        name: partial(start_ours, runs / str(place), config, args.ranks, [*fixed, *own], args.steps)
        for place, (name, own) in enumerate(sides.items())
    }
    turns = alternate(start, args.rounds)
    return [compare(name, turns[SYNCHRONOUS], turns[name]) for name in sides if name != SYNCHRONOUS], {}


def compare(name: str, synchronous: list[Turn], carried: list[Turn]) -> Row:
    """Return the row of two sides."""
    columns: dict[str, float | int | str] = {}
    rounds = {SYNCHRONOUS: rates(synchronous), CARRIED: rates(carried)}
    steps, generation = (
        middle([rate[part] for rate in rounds[CARRIED]])
        / middle([rate[part] for rate in rounds[SYNCHRONOUS]])
        for part in (0, 1)
    )
    for label, taken in ((SYNCHRONOUS, synchronous), (CARRIED, carried)):
        records = [record for turn in taken for record in turn]
        columns[f"{label}, tokens/s"] = middle([rate[0] for rate in rounds[label]])
        for part in ("mean", "greedy"):
            values = [record[f"perf/idle_share_gen/{part}"] for record in records]
            columns[f"{label}, idle {part}"] = middle(values)
    columns["generation alone"] = generation
    columns["staleness"] = middle([record["staleness/mean"] for turn in carried for record in turn])
    return Row(name, columns, steps, {side: [rate[0] for rate in taken] for side, taken in rounds.items()})


def rates(turns: list[Turn]) -> list[tuple[float, float]]:
    """Return the tokens that each turn trained on per second of its steps, and of its generation."""
    found = []
    for turn in turns:
        tokens = sum(record["perf/total_num_tokens"] for record in turn)
        found.append((tokens / turn_seconds(turn), tokens / sum(record["timing_s/gen"] for record in turn)))
    return found


def write_config(directory: Path, args: Namespace) -> Path:
    """Write the config of all sides; return the file."""
    config = {
        "algorithm": "grpo",
        "run": {"name": "bench"},
        "model": {"dtype": "float32"},
        "data": {"max_prompt_tokens": 16, "prompts_per_step": args.prompts},
        "training": {"optimizer": {"lr": 1e-8}},  # the lengths must not change
        "rollout": {
            "samples_per_prompt": args.samples,
            "max_response_tokens": args.max_tokens,
            "max_concurrent_samples": 2 * args.prompts * args.samples,
            "cpu_kv_cache_mib": 256,
        },
        "rollout_correction": {"truncate_tokens": 2.0},
        "logging": {"tensorboard": False},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.dump(config))
    return path
