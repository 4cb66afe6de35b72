"""Measure Lockstep and compare it with its peers: one command per table.

    python tools/bench.py grpo --rows quickstart           a GRPO step against TRL's GRPOTrainer
    python tools/bench.py learn                            time to 0.90 accuracy, against TRL
    python tools/bench.py control --check docs/performance.json
    python tools/bench.py show docs/performance.json       the stored tables
    python tools/bench.py TABLE --help

Both sides of a comparison run in one command and take turns, step by step, so that both see the same load of
the machine. Figures are medians over the rounds. The table is printed as Markdown and, with --out, written as
JSON. --store adds it to a file of results (docs/performance.json). --check compares its figures, most of
which are ratios, with such a file and exits with 1 if a figure is worse by more than --tolerance.

--work is a directory for models, TRL's environment and the quickstart's warm-up, which are reused. The
default is a temporary directory.
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

# Python searches only tools/ for modules when it runs this file as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench_tables import checkpoint, configs, control, generation, grpo, packing, sweep  # noqa: E402
from tools.bench_tables.report import (  # noqa: E402
    Result,
    describe_machine,
    describe_versions,
    read_results,
    regressions,
    store_results,
)
from tools.bench_tables.sides import BenchFailed  # noqa: E402


@dataclass(frozen=True)
class Table:
    """One table of the benchmark."""

    title: str
    figure: str
    """Meaning of the rows' figures."""
    better: str
    add_arguments: Callable
    measure: Callable
    """(arguments, directory of reused files, directory of this call) -> (rows, versions of peers)."""


TABLES = {
    "grpo": Table("A GRPO step against TRL", "TRL / Lockstep", "higher", grpo.add_arguments, grpo.measure),
    "learn": Table(
        "Time to held-out accuracy on the quickstart's task, against TRL",
        "TRL / Lockstep",
        "higher",
        grpo.add_learn_arguments,
        grpo.measure_learning,
    ),
    "generation": Table(
        "Tokens per second of the generation phase against bare vLLM, one rank with one thread",
        "Lockstep / vLLM",
        "higher",
        generation.add_arguments,
        generation.measure,
    ),
    "packing": Table(
        "An update on packed against padded samples",
        "padded / packed",
        "higher",
        packing.add_arguments,
        packing.measure,
    ),
    "queue": Table(
        "Idle share of two replicas with static and shared queues, log-normal lengths (sigma 1)",
        "idle share",
        "lower",
        configs.add_queue_arguments,
        configs.measure_queues,
    ),
    "carry_over": Table(
        "Carry-over against synchronous steps on the same ranks, log-normal lengths (sigma 1)",
        "carry-over / synchronous, tokens per second of whole steps",
        "higher",
        configs.add_carry_over_arguments,
        configs.measure_carry_over,
    ),
    "carried_agents": Table(
        "Carry-over against synchronous steps, with environments of log-normal times (sigma 1)",
        "carry-over / synchronous, trajectories per second of whole steps",
        "higher",
        configs.add_carried_agents_arguments,
        configs.measure_carried_agents,
    ),
    "numerics": Table(
        "A GRPO step with model.numerics=bitwise against fast",
        "bitwise / fast, seconds of a step",
        "lower",
        configs.add_numerics_arguments,
        configs.measure_numerics,
    ),
    "sweep": Table(
        "A sweep of adapters in one job against the same points alone",
        "one job / alone, core-seconds",
        "lower",
        sweep.add_arguments,
        sweep.measure,
    ),
    "control": Table(
        "Share of a step outside generation, forward, backward and refit, and its growth with the ranks",
        "share, or seconds",
        "lower",
        control.add_arguments,
        control.measure,
    ),
    "checkpoint": Table(
        "Seconds for which a checkpoint blocks training",
        "background / foreground",
        "lower",
        checkpoint.add_arguments,
        checkpoint.measure,
    ),
}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.table == "show":
        print("\n".join(result.markdown() for result in read_results(args.results).values()), end="")
        return 0
    table = TABLES[args.table]
    if args.check and not args.check.exists():
        sys.exit(f"bench: --check={args.check} does not exist; create the file with --store.")
    work = args.work or Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    work.mkdir(parents=True, exist_ok=True)
    runs = Path(tempfile.mkdtemp(prefix="runs-", dir=work))
    machine = describe_machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sides are stopped too
    try:
        rows, versions = table.measure(args, work, runs)
    except BenchFailed as error:
        sys.exit(f"bench: {error}")
    finally:
        shutil.rmtree(runs if args.work else work, ignore_errors=True)
    machine["load after"] = f"{os.getloadavg()[0]:.1f}"
    command = shlex.join(["python", "tools/bench.py", *(sys.argv[1:] if argv is None else argv)])
    result = Result(
        table=args.table,
        title=table.title,
        figure=table.figure,
        better=table.better,
        rows=rows,
        command=command,
        machine=machine,
        versions=describe_versions() | versions,
    )
    print(result.markdown(), flush=True)
    if args.out:
        args.out.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    worse = (
        regressions(result, read_results(args.check).get(args.table), args.tolerance) if args.check else []
    )
    if args.store:
        store_results(args.store, [result])
    for sentence in worse:
        print(f"worse: {sentence}", file=sys.stderr)
    return 1 if worse else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = parser.add_subparsers(dest="table", metavar="TABLE", required=True)
    show = tables.add_parser("show", help="Print the tables of a file of results")
    show.add_argument("results", type=Path, metavar="FILE")
    for name, table in TABLES.items():
        sub = tables.add_parser(name, help=table.title, description=table.title)
        sub.add_argument(
            "--work", type=Path, metavar="DIR", help="directory of files that are reused (temporary)"
        )
        sub.add_argument("--out", type=Path, metavar="FILE", help="write the table as JSON")
        sub.add_argument("--store", type=Path, metavar="FILE", help="add the table to a file of results")
        sub.add_argument("--check", type=Path, metavar="FILE", help="compare with a file of results")
        sub.add_argument(
            "--tolerance", type=float, default=0.15, help="relative loss that --check accepts (0.15)"
        )
        table.add_arguments(sub.add_argument)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
