"""`lockstep status [DIR ...]`: print a table of runs.

DIR is a run directory, the directory of a sweep, or a directory that contains runs or sweeps (default: runs).
States: queued, running, stopped (can continue), finished, failed, lost, unstarted, unreadable (the column
`reason` says why). A lost run has ended without a report: its job, or its process on this host, is gone, or
one of its ranks has sent no heartbeat for 5 minutes.
"""

from collections import Counter
from pathlib import Path

from launch.runs import RunState, find_runs, read_runs
from rl.config.command_line import make_parser


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directories", metavar="DIR", type=Path, nargs="*", default=[Path("runs")])
    arguments = parser.parse_args(argv)
    directories = dict.fromkeys(run for directory in arguments.directories for run in find_runs(directory))
    runs = read_runs(directories)
    if not runs:
        print(f"no runs in {', '.join(map(str, arguments.directories))}")
        return 0
    print(table(runs))
    counts = Counter(run.state for run in runs)
    print(f"\n{len(runs)} runs: " + ", ".join(f"{number} {state}" for state, number in counts.most_common()))
    return 0


def table(runs: list[RunState]) -> str:
    """Return a table with one line per run. Unknown values are shown as '-'."""
    rows = [["run", "state", "step", "reward", "heartbeat", "attempts", "job", "reason"]]
    for run in runs:
        steps = None if run.step is None else f"{run.step}" + (f"/{run.max_steps}" if run.max_steps else "")
        rows.append(
            [
                str(run.directory),
                run.state,
                _cell(steps),
                _cell(None if run.reward is None else f"{run.reward:.4f}"),
                _cell(None if run.silent_s is None else age(run.silent_s)),
                _cell(run.attempts),
                _cell(run.job),
                run.reason if len(run.reason) <= 60 else run.reason[:57] + "...",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def _cell(value: object) -> str:
    return "-" if value in (None, "") else str(value)


def age(seconds: float) -> str:
    """Return a duration rounded down to one unit, for example 12 s, 3 min, 2 h or 5 d."""
    for limit, unit, word in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // unit)} {word}"
    return f"{int(seconds // 86400)} d"
