"""Seconds and memory that the dry run predicts, beside those measured on this machine in many layouts.

The constants (`tools.dev.bench_tables.machine`) are measured for each number of ranks, before the first
layout. Ranks have one thread. Answers do not end before the limit of tokens, so that the lengths are known.
Figures are medians of the steps, as the constants are medians of passes. Memory is the maximum of the rank
with most. The last rows are the choices that a search by the prediction makes: for each number of ranks and
of tokens the layout with the shortest predicted step, and its measured seconds / those of the fastest.

    python tools/dev/bench.py measured --model models/smollm2-135m --rounds 2
    python tools/dev/bench.py measured --override rollout.samples_per_prompt=4
"""

import json
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rl.config.schema import load_config
from rl.dry_run.estimate import estimate
from rl.dry_run.hardware import GIB
from tools.dev.bench_tables.machine import Dtype, hardware_of, measure_machine
from tools.dev.bench_tables.program import CONFIG, of_task, run_alone
from tools.dev.bench_tables.report import TableLine, shown
from tools.dev.bench_tables.sides import CLOCK, PEAK
from tools.dev.bench_tables.tasks import save_task, save_task_of

PHASES = ("gen", "old_log_prob", "update_actor", "update_weights")
"""Metrics of the compared phases, without timing_s/ (for example timing_s/gen). A row shows their sum."""
SMALL = "training.micro_batch_tokens=1024"
LONG = ("rollout.max_response_tokens=384", "rollout.samples_per_prompt=4")


COMMON = (
    "data.prompts_per_step=8",
    "training.prompts_per_minibatch=4",
    "training.shared_prefix=false",  # the dry run counts prompts once per sequence
    "rollout.samples_per_prompt=8",
    "rollout.max_response_tokens=128",
)
"""Overrides of all layouts. Two updates per step; the second one needs a separate log-prob pass."""
OF_MODEL = (
    "data.max_prompt_tokens=40",
    "data.prompts_per_step=4",
    "training.prompts_per_minibatch=2",
    "training.micro_batch_tokens=624",  # six sequences
    "rollout.samples_per_prompt=6",
    "rollout.max_response_tokens=64",
)
"""Further overrides of all layouts with --model."""


@dataclass(frozen=True)
class Measured:
    """A layout of the table."""

    name: str
    ranks: int
    overrides: tuple[str, ...] = ()

    @property
    def dtype(self) -> Dtype:
        return "bfloat16" if "model.dtype=bfloat16" in self.overrides else "float32"


LAYOUTS = [
    Measured("one rank", 1),
    Measured("one rank, 384 tokens", 1, LONG),
    Measured("one rank, small micro-batches", 1, (SMALL,)),
    Measured("one rank, recomputation", 1, ("training.recompute=full",)),
    Measured("dp 2", 2),
    Measured("dp 2, 384 tokens", 2, LONG),
    Measured("tp 2", 2, ("training.tp=2",)),
    Measured("tp 2, 384 tokens", 2, (*LONG, "training.tp=2")),
    Measured("tp 2, engine too", 2, ("training.tp=2", "rollout.tp=2")),
    Measured("cp 2", 2, ("training.cp=2",)),
    Measured("cp 2, 384 tokens", 2, (*LONG, "training.cp=2")),
    Measured("pp 2", 2, ("training.pp=2", SMALL)),
    Measured("pp 2, vpp 2", 2, ("training.pp=2", "training.vpp=2", SMALL)),
    Measured("dp 4", 4),
    Measured("pp 4", 4, ("training.pp=4", SMALL)),
    Measured("tp 2, pp 2", 4, ("training.tp=2", "training.pp=2", SMALL)),
    Measured("cp 2, dp 2", 4, ("training.cp=2",)),
]
MODEL_LAYOUTS = [
    Measured("one rank", 1),
    Measured("one rank, bfloat16", 1, ("model.dtype=bfloat16",)),
    Measured("one rank, recomputation", 1, ("training.recompute=full",)),
    Measured("dp 2", 2),
    Measured("pp 2", 2, ("training.pp=2",)),
    Measured("cp 2", 2, ("training.cp=2",)),
]
"""Layouts with --model."""


def add_arguments(add: Callable[..., Any]) -> None:
    add("--rounds", type=int, default=5, help="counted steps of each layout (5)")
    add("--model", type=Path, metavar="DIR", help="a checkpoint (a random model of 2.6 M parameters)")
    add("--layouts", nargs="*", default=[], metavar="NAME", help="layouts (all)")
    add(
        "--clock",
        choices=["elapsed", "processor"],
        default="elapsed",
        help="seconds that are compared; processor: those of rank 0, without waiting, on a machine that has "
        "other work (elapsed)",
    )
    add(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="key of all layouts, another task",
    )
    add("--constants", type=Path, help="file of the machine's constants; it is written if it does not exist")


def measure(args: Namespace, runs: Path) -> list[TableLine]:
    """Return a row per layout with predicted and measured seconds of each phase."""
    if args.model:
        task, layouts = save_task_of(runs / "task", args.model), MODEL_LAYOUTS
    else:
        task, layouts = save_task(runs / "task", "2.6M", mean_length=1024, max_length=1024), LAYOUTS
    is_known = args.constants and args.constants.exists()
    constants = json.loads(args.constants.read_text()) if is_known else {}
    rows: list[TableLine] = []
    tasks = defaultdict[tuple[int, bool], list[TableLine]](list)
    for place, layout in enumerate(layouts):
        if args.layouts and layout.name not in args.layouts:
            continue
        if (key := f"{layout.ranks} {layout.dtype}") not in constants:
            constants[key] = measure_machine(task / "model", layout.ranks, args.clock, layout.dtype)
            if args.constants:
                args.constants.write_text(json.dumps(constants, indent=1))
        rows.append(row_of(layout, task, constants[key], runs / f"run-{place}", args))
        tasks[layout.ranks, set(LONG) <= set(layout.overrides)].append(rows[-1])
        print(rows[-1].name, rows[-1].columns, rows[-1].figure, file=sys.stderr, flush=True)
    rows += [rates(key, found) for key, found in constants.items() if "forward_many" in found]
    return rows + [choice(ranks, found) for (ranks, _), found in tasks.items() if len(found) > 1]


def rates(key: str, found: dict[str, float]) -> TableLine:
    """Return the row of the machine's matrix rate, and the share of it that passes over many tokens reach."""
    columns: dict[str, float | int | str] = {"matrix products of a rank, GFLOP/s": found["product"] / 1e9}
    for name, factor in (("forward", 1), ("update", 3)):
        count = factor * (found["operations"] + found["scores_many"])
        columns[f"{name}, share"] = count / found[f"{name}_many"] / found["product"]
    return TableLine(f"{key}: passes", columns)


def choice(ranks: int, found: list[TableLine]) -> TableLine:
    """Return the row of a task: the layout that the prediction chooses, and how much slower than the fastest
    it was."""

    def seconds(kind: str) -> Callable[[TableLine], float]:
        return lambda row: float(row.columns[f"{kind}, s"])

    chosen, best = min(found, key=seconds("predicted")), min(found, key=seconds("measured"))
    columns = {"predicted, s": chosen.columns["predicted, s"], "measured, s": chosen.columns["measured, s"]}
    ratio = seconds("measured")(chosen) / seconds("measured")(best)
    return TableLine(f"choice of {len(found)} on {ranks} ranks: {chosen.name} ({best.name})", columns, ratio)


def row_of(
    layout: Measured, task: Path, constants: dict[str, float], directory: Path, args: Namespace
) -> TableLine:
    """Run a layout; return its row."""
    overrides = [
        *of_task(task),
        *COMMON,
        *(OF_MODEL if args.model else ()),
        *layout.overrides,
        *args.override,
    ]
    environment = {"OMP_NUM_THREADS": "1", CLOCK: args.clock}
    records = run_alone(directory, layout.ranks, overrides, args.rounds, environment)
    hardware, waits = hardware_of(constants, layout.ranks), True
    if args.clock == "processor":
        hardware, waits = replace(hardware, cores_per_rank=1.0), False
    config = load_config(str(CONFIG), ["algorithm=grpo", *overrides])
    prompt, response = (records[0][f"{name}_length/mean"] for name in ("prompt", "response"))
    found = estimate(config, layout.ranks, hardware, prompt=prompt, response=response, sigma=0.0)
    seconds = {phase: [record.get(f"timing_s/{phase}", 0.0) for record in records] for phase in PHASES}
    idle = {} if waits else found.idle
    predicted = {phase: found.seconds.get(phase, 0.0) - idle.get(phase, 0.0) for phase in PHASES}
    columns: dict[str, float | int | str] = {
        phase: f"{shown(predicted[phase])} / {shown(median(times))}" for phase, times in seconds.items()
    }
    totals = [sum(step) for step in zip(*seconds.values())]
    rest = median(record["timing_s/step"] - total for record, total in zip(records, totals))
    total = sum(predicted.values())
    columns |= {"idle, s": sum(found.idle.values()), "predicted, s": total}
    columns |= {"measured, s": median(totals), "not predicted, s": rest}
    peaks = max(found.memory.peak(phase)[0] for phase in ("training", "refit", "generation")) / GIB
    columns["GiB of a rank"] = f"{shown(peaks)} / {shown(max(record[PEAK] for record in records))}"
    return TableLine(layout.name, columns, total / median(totals), seconds)
