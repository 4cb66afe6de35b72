"""Measure Lockstep: one command per table.

    python tools/dev/bench.py control --ranks 2                share of a step outside of its work
    python tools/dev/bench.py TABLE --help

Both sides of a comparison run in one command and take turns, step by step, so that both see the same load of
the machine. Figures are medians over the rounds. The table is printed as Markdown and, with --out, written as
JSON. docs/performance.md has the results.

Models and runs are written to a temporary directory (TMPDIR).
"""

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Python searches only tools/dev/ for modules when it runs this file as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rl.config.command_line import make_parser  # noqa: E402
from tools.dev.bench_tables import (
    checks,
    configs,
    control,
    full_fine_tuning,
    generation,
    host,
    measured,
    peer,
    published,
)  # noqa: E402
from tools.dev.bench_tables.report import Result, describe_machine, describe_versions  # noqa: E402
from tools.dev.bench_tables.sides import BenchFailed  # noqa: E402


@dataclass(frozen=True)
class BenchTable:
    """One table of the benchmark."""

    title: str
    figure: str
    """Meaning of the rows' figures."""
    add_arguments: Callable
    measure: Callable
    """(arguments, directory of the runs) -> rows."""


TABLES = {
    "carry_over": BenchTable(
        "Carry-over against synchronous steps on the same ranks, log-normal lengths (sigma 1)",
        "carry-over / synchronous, tokens per second of whole steps",
        configs.add_carry_over_arguments,
        configs.measure_carry_over,
    ),
    "carried_agents": BenchTable(
        "Carry-over against synchronous steps, with environments of log-normal times (sigma 1)",
        "carry-over / synchronous, trajectories per second of whole steps",
        configs.add_carried_agents_arguments,
        configs.measure_carried_agents,
    ),
    "generation": BenchTable(
        "Generation of a GRPO step beside vLLM alone, the same checkpoint and prompts",
        "Lockstep / vLLM, tokens per second",
        generation.add_arguments,
        generation.measure,
    ),
    "host": BenchTable(
        "An engine step of a model that costs nothing: scheduling, outputs and bookkeeping",
        "Lockstep / vLLM's scheduler, milliseconds per step",
        host.add_arguments,
        host.measure,
    ),
    "numerics": BenchTable(
        "A GRPO step with model.numerics=bitwise against fast",
        "bitwise / fast, seconds of a step",
        configs.add_numerics_arguments,
        configs.measure_numerics,
    ),
    "peer": BenchTable(
        "A GRPO step beside TRL's GRPOTrainer, the same checkpoint, prompts and reward",
        "TRL / Lockstep, seconds of a step",
        peer.add_arguments,
        peer.measure,
    ),
    "checks": BenchTable(
        "The always-on checks, timed inside a run of one rank with one thread",
        "percent of a step, median",
        checks.add_arguments,
        checks.measure,
    ),
    "full_fine_tuning": BenchTable(
        "GPUs of 80 GiB that full fine-tuning needs, by dry runs",
        "GPUs / those with float32 moments on the GPU",
        full_fine_tuning.add_arguments,
        full_fine_tuning.measure,
    ),
    "published": BenchTable(
        "Seconds of a step that the dry run predicts, against published ones",
        "predicted / published",
        published.add_arguments,
        published.measure,
    ),
    "measured": BenchTable(
        "Seconds of a step and memory that the dry run predicts / measured here",
        "predicted / measured, sum of the phases",
        measured.add_arguments,
        measured.measure,
    ),
    "control": BenchTable(
        "Share of a step outside generation, forward, backward and refit, and its growth with the ranks",
        "share, or seconds",
        control.add_arguments,
        control.measure,
    ),
}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    table = TABLES[args.table]
    runs = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    machine = describe_machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sides are stopped too
    try:
        rows = table.measure(args, runs)
    except BenchFailed as error:
        sys.exit(f"bench: {error}")
    finally:
        shutil.rmtree(runs, ignore_errors=True)
    machine["load after"] = f"{os.getloadavg()[0]:.1f}"
    command = shlex.join(["python", "tools/dev/bench.py", *(sys.argv[1:] if argv is None else argv)])
    result = Result(
        table=args.table,
        title=table.title,
        figure=table.figure,
        rows=rows,
        command=command,
        machine=machine,
        versions=describe_versions(),
    )
    print(result.markdown(), flush=True)
    if args.out:
        args.out.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    tables = parser.add_subparsers(dest="table", metavar="TABLE", required=True)
    for name, table in TABLES.items():
        sub = tables.add_parser(name, help=table.title, description=table.title)
        sub.add_argument("--out", type=Path, metavar="FILE", help="write the table as JSON")
        table.add_arguments(sub.add_argument)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
