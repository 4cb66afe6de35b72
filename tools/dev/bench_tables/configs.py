"""Configurations of one program against each other: carry-over, and exact numerics."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.dev.bench_tables.program import add_step_arguments, compare_configs, turn_seconds
from tools.dev.bench_tables.report import TableLine, middle
from tools.dev.bench_tables.sides import Turn
from tools.dev.bench_tables.tasks import save_task


def metric(turns: list[Turn], name: str) -> float:
    """Return the median of a metric over the steps of all turns."""
    return middle([record[name] for turn in turns for record in turn])


# Carry-over -----------------------------------------------------------------------------------------------

SYNCHRONOUS, CARRIED = "synchronous", "carry-over"


def add_carry_over_arguments(add: Callable[..., Any]) -> None:
    add_step_arguments(add, max_tokens=600, steps=5)
    add("--median", type=int, default=40, help="median answer in tokens (40)")
    add_carried_sides(add)


def add_carried_agents_arguments(add: Callable[..., Any]) -> None:
    add_step_arguments(add, max_tokens=128, steps=8)
    add("--median", type=float, default=0.1, help="median answer of an environment in seconds (0.1)")
    add_carried_sides(add)


def add_carried_sides(add: Callable[..., Any]) -> None:
    add("--ranks", type=int, default=2, help="ranks of each side (2)")
    add("--staleness", type=int, nargs="+", default=[1, 2], help="values of rollout.max_staleness (1 2)")


def measure_carry_over(args: Namespace, runs: Path) -> list[TableLine]:
    """Return a row per limit of staleness: tokens per second of both sides, in whole steps and generation."""
    task = save_task(
        runs / "task", args.size, mean_length=args.median, max_length=args.max_tokens, is_log_normal=True
    )
    turns = run_carried(args, task, runs)
    rows = rows_of(turns, {side: step_rates(taken) for side, taken in turns.items()}, "tokens/s")
    alone = middle(generation_rates(turns[SYNCHRONOUS]))
    for row in rows:
        row.columns["generation alone"] = middle(generation_rates(turns[row.name])) / alone
        for label, side in ((SYNCHRONOUS, SYNCHRONOUS), (CARRIED, row.name)):
            for part in ("mean", "greedy"):
                row.columns[f"{label}, idle {part}"] = metric(turns[side], f"perf/idle_share_gen/{part}")
    return rows


def measure_carried_agents(args: Namespace, runs: Path) -> list[TableLine]:
    """Return a row per limit of staleness: trajectories per second of whole steps of both sides.

    The first step of a turn does not count: environments have answered while the other side had its turn.
    """
    task = save_task(runs / "task", args.size, mean_length=8, max_length=16)
    game = Path(__file__).with_name("slow_game.py")
    common = (
        f"agents.environment={game}:Slow",
        f"agents.kwargs={{median_s: {args.median}}}",
        "agents.max_tokens_per_turn=16",
    )
    turns = run_carried(args, task, runs, common, carried=("rollout.oversample=1.5",))
    size = args.prompts * args.samples
    rates = {
        side: [(len(turn) - 1) * size / turn_seconds(turn[1:]) for turn in taken]
        for side, taken in turns.items()
    }
    return rows_of(turns, rates, "trajectories/s")


def run_carried(
    args: Namespace, task: Path, runs: Path, common: Sequence[str] = (), carried: Sequence[str] = ()
) -> dict[str, list[Turn]]:
    """Return the turns of synchronous steps, and of carry-over with each limit of staleness.

    common: overrides of all sides. carried: further ones of carry-over.
    """
    common = [*common, "rollout_correction.truncate_tokens=2.0"]
    sides = {SYNCHRONOUS: common} | {
        f"{CARRIED}, max_staleness {limit}": [
            *common,
            "rollout.carry_over=true",
            f"rollout.max_staleness={limit}",
            *carried,
        ]
        for limit in args.staleness
    }
    return compare_configs(args, task, runs, args.ranks, sides)


def rows_of(turns: dict[str, list[Turn]], rates: dict[str, list[float]], unit: str) -> list[TableLine]:
    """Return a row per side with carry-over. rates: the rates of each side's turns, in `unit`."""
    rows = []
    for side in list(turns)[1:]:
        rounds = {SYNCHRONOUS: rates[SYNCHRONOUS], CARRIED: rates[side]}
        columns: dict[str, float | int | str] = {
            f"{label}, {unit}": middle(own) for label, own in rounds.items()
        }
        columns["staleness"] = metric(turns[side], "staleness/mean")
        rows.append(TableLine(side, columns, middle(rates[side]) / middle(rates[SYNCHRONOUS]), rounds))
    return rows


def step_rates(turns: list[Turn]) -> list[float]:
    """Return the tokens that each turn trained on per second of its steps."""
    return [sum(record["perf/total_num_tokens"] for record in turn) / turn_seconds(turn) for turn in turns]


def generation_rates(turns: list[Turn]) -> list[float]:
    """Return the tokens that each turn trained on per second of its generation."""
    return [
        sum(record["perf/total_num_tokens"] for record in turn)
        / sum(record["timing_s/gen"] for record in turn)
        for turn in turns
    ]


# Exact numerics -------------------------------------------------------------------------------------------

FAST, BITWISE = "fast", "bitwise"


def add_numerics_arguments(add: Callable[..., Any]) -> None:
    add_step_arguments(add, max_tokens=32, steps=1)
    add("--ranks", type=int, nargs="+", default=[1, 2], help="tensor parallel sizes of both sides (1 2)")


def measure_numerics(args: Namespace, runs: Path) -> list[TableLine]:
    """Return a row per number of ranks: seconds of a step, and the largest difference of probabilities."""
    task = save_task(runs / "task", args.size, mean_length=args.max_tokens // 2, max_length=args.max_tokens)
    rows = []
    for ranks in args.ranks:
        layout = [f"training.tp={ranks}", f"rollout.tp={ranks}"]
        sides = {name: [*layout, f"model.numerics={name}"] for name in (FAST, BITWISE)}
        turns = compare_configs(args, task, runs / f"tp-{ranks}", ranks, sides)
        seconds = {side: [turn_seconds(turn) for turn in taken] for side, taken in turns.items()}
        columns: dict[str, float | int | str] = {}
        for side, taken in turns.items():
            columns[f"{side}, s per step"] = middle(seconds[side]) / args.steps
            columns[f"{side}, largest difference"] = max(
                record["training/rollout_probs_diff_max"] for turn in taken for record in turn
            )
        rows.append(
            TableLine(f"tp {ranks}", columns, middle(seconds[BITWISE]) / middle(seconds[FAST]), seconds)
        )
    return rows
