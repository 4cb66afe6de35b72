"""Cost of model.numerics=bitwise: steps of GRPO against those of the ordinary kernels."""

from argparse import Namespace
from functools import partial
from pathlib import Path

import yaml

from tools.bench_tables.grpo import NO_VALIDATION, start_ours, turn_seconds
from tools.bench_tables.report import Row, middle
from tools.bench_tables.sides import Turn, alternate
from tools.bench_tables.tasks import SIZES, save_task

FAST, BITWISE = "fast", "bitwise"
GAP = "training/rollout_probs_diff_max"


def add_arguments(add) -> None:
    add("--size", choices=SIZES, default="0.7M", help="model (0.7M)")
    add("--prompts", type=int, default=16, help="prompts of a step (16)")
    add("--samples", type=int, default=4, help="samples per prompt (4)")
    add("--max-tokens", type=int, default=32, help="longest answer (32)")
    add("--rounds", type=int, default=5, help="counted steps of each side (5)")
    add("--ranks", type=int, nargs="+", default=[1, 2], help="tensor parallel sizes of both sides (1 2)")


def measure(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return a row per number of ranks: seconds of a step, and the largest difference of probabilities."""
    task = save_task(runs / "task", args.size, mean_length=args.max_tokens // 2, max_length=args.max_tokens)
    config = write_config(runs, task, args)
    rows = []
    for ranks in args.ranks:
        layout = [f"training.tp={ranks}", f"rollout.tp={ranks}", *NO_VALIDATION]
        start = {
            side: partial(start_ours, runs / f"{side}-{ranks}", config, ranks, [*layout, *own], 1)
            for side, own in ((FAST, []), (BITWISE, ["model.numerics=bitwise"]))
        }
        rows.append(compare(ranks, alternate(start, args.rounds)))
    return rows, {}


def compare(ranks: int, turns: dict[str, list[Turn]]) -> Row:
    """Return the row of a number of ranks."""
    seconds = {side: [turn_seconds(turn) for turn in taken] for side, taken in turns.items()}
    columns: dict[str, float | int | str] = {}
    for side, taken in turns.items():
        columns[f"{side}, s per step"] = middle(seconds[side])
        columns[f"{side}, largest difference"] = max(record[GAP] for turn in taken for record in turn)
    return Row(f"tp {ranks}", columns, middle(seconds[BITWISE]) / middle(seconds[FAST]), seconds)


def write_config(directory: Path, task: Path, args: Namespace) -> Path:
    """Write the config of both sides; return the file."""
    config = {
        "algorithm": "grpo",
        "run": {"name": "bench", "max_steps": args.rounds + 1},
        "model": {"path": f"{task}/model", "dtype": "float32"},
        "data": {
            "train": [f"{task}/train.parquet"],
            "max_prompt_tokens": 16,
            "prompts_per_step": args.prompts,
        },
        "reward": {"function": f"{task}/reward.py:score"},
        "rollout": {"samples_per_prompt": args.samples, "max_response_tokens": args.max_tokens},
        "logging": {"tensorboard": False, "rollouts": "none"},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.dump(config))
    return path
