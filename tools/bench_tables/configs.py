"""Configurations of one program against each other: carry-over, and exact numerics."""

from argparse import Namespace
from pathlib import Path

from tools.bench_tables.program import add_step_arguments, compare_configs, turn_seconds
from tools.bench_tables.report import Row, middle
from tools.bench_tables.sides import Turn
from tools.bench_tables.tasks import save_task


def metric(turns: list[Turn], name: str) -> float:
    """Return the median of a metric over the steps of all turns."""
    return middle([record[name] for turn in turns for record in turn])


# Carry-over -----------------------------------------------------------------------------------------------

SYNCHRONOUS = "synchronous"


def add_carry_over_arguments(add) -> None:
    add_step_arguments(add, max_tokens=600, steps=5)
    add("--median", type=int, default=40, help="median answer in tokens (40)")
    add("--ranks", type=int, default=2, help="ranks of each side (2)")
    add("--staleness", type=int, nargs="+", default=[1, 2], help="values of rollout.max_staleness (1 2)")


def measure_carry_over(args: Namespace, runs: Path) -> list[Row]:
    """Return a row per limit of staleness: tokens per second of both sides, in whole steps and generation."""
    task = save_task(
        runs / "task", args.size, mean_length=args.median, max_length=args.max_tokens, is_log_normal=True
    )
    sides = {SYNCHRONOUS: []} | {
        f"carry-over, max_staleness {limit}": ["rollout.carry_over=true", f"rollout.max_staleness={limit}"]
        for limit in args.staleness
    }
    corrected = {name: ["rollout_correction.truncate_tokens=2.0", *own] for name, own in sides.items()}
    turns = compare_configs(args, task, runs, args.ranks, corrected)
    synchronous = turns.pop(SYNCHRONOUS)
    rows = []
    for name, carried in turns.items():
        columns: dict[str, float | int | str] = {}
        for label, taken in ((SYNCHRONOUS, synchronous), ("carry-over", carried)):
            columns[f"{label}, tokens/s"] = middle(step_rates(taken))
            for part in ("mean", "greedy"):
                columns[f"{label}, idle {part}"] = metric(taken, f"perf/idle_share_gen/{part}")
        columns["generation alone"] = middle(generation_rates(carried)) / middle(
            generation_rates(synchronous)
        )
        columns["staleness"] = metric(carried, "staleness/mean")
        rounds = {SYNCHRONOUS: step_rates(synchronous), "carry-over": step_rates(carried)}
        rows.append(Row(name, columns, middle(rounds["carry-over"]) / middle(rounds[SYNCHRONOUS]), rounds))
    return rows


def add_carried_agents_arguments(add) -> None:
    add_step_arguments(add, max_tokens=128, steps=8)
    add("--median", type=float, default=0.1, help="median answer of an environment in seconds (0.1)")
    add("--ranks", type=int, default=2, help="ranks of each side (2)")
    add("--staleness", type=int, nargs="+", default=[1, 2], help="values of rollout.max_staleness (1 2)")


def measure_carried_agents(args: Namespace, runs: Path) -> list[Row]:
    """Return a row per limit of staleness: trajectories per second of whole steps of both sides.

    The first step of a turn does not count: environments have answered while the other side had its turn.
    """
    task = save_task(runs / "task", args.size, mean_length=8, max_length=16)
    game = Path(__file__).with_name("slow_game.py")
    common = [
        f"agents.environment={game}:Slow",
        f"agents.kwargs={{median_s: {args.median}}}",
        "agents.max_tokens_per_turn=16",
        "rollout_correction.truncate_tokens=2.0",
    ]
    sides = {SYNCHRONOUS: common} | {
        f"carry-over, max_staleness {limit}": [
            *common,
            "rollout.carry_over=true",
            f"rollout.max_staleness={limit}",
            "rollout.oversample=1.5",
        ]
        for limit in args.staleness
    }
    turns = compare_configs(args, task, runs, args.ranks, sides)
    size = args.prompts * args.samples
    rates = {
        name: [(len(turn) - 1) * size / turn_seconds(turn[1:]) for turn in taken]
        for name, taken in turns.items()
    }
    rows = []
    for name in list(sides)[1:]:
        rounds = {SYNCHRONOUS: rates[SYNCHRONOUS], "carry-over": rates[name]}
        columns: dict[str, float | int | str] = {
            f"{label}, trajectories/s": middle(own) for label, own in rounds.items()
        }
        columns["staleness"] = metric(turns[name], "staleness/mean")
        rows.append(Row(name, columns, middle(rates[name]) / middle(rates[SYNCHRONOUS]), rounds))
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


def add_numerics_arguments(add) -> None:
    add_step_arguments(add, max_tokens=32, steps=1)
    add("--ranks", type=int, nargs="+", default=[1, 2], help="tensor parallel sizes of both sides (1 2)")


def measure_numerics(args: Namespace, runs: Path) -> list[Row]:
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
        rows.append(Row(f"tp {ranks}", columns, middle(seconds[BITWISE]) / middle(seconds[FAST]), seconds))
    return rows
