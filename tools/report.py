"""Report the results of runs: a table, a plot of reward and held-out accuracy, and a page for a browser.

    lockstep report runs/grpo
    lockstep report runs/grpo --before runs/sft --png grpo.png
    lockstep report runs/toy-* --png curves.png --html curves.html
    lockstep report runs/quickstart --expect quickstart

Reads only the run directories, also during a run, and shows '-' for missing values. `--before` adds a column
for the run that this one started from. For several runs the plot has the held-out accuracy of each. The page
is one file that needs no network (docs/report.md). `--expect` compares the run with the expected curve of a
recipe (configs/expected/) and exits with code 3 if a point is outside its range or missing.
"""

import itertools
import sys
from pathlib import Path
from types import ModuleType

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser
from rl.run_directory.bad_entries import read_each, sentence_of
from rl.run_directory.metric_log import FILE_NAME, STEP, accuracies, read_records
from rl.run_directory.status import refuse_missing, why_no_step
from tools.recipes import Expected, read_recipe
from tools.report_page.write import write_page

REWARD = "critic/score/mean"
UNMET_EXIT = 3
"""Exit code if the run misses the expected curve; 1 means an invalid input."""
Point = tuple[int, float]
"""A step and the value of a metric at it."""


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="directory of a run")
    add("--before", metavar="SFT_RUN_DIR", type=Path, help="directory of the run before it")
    expect_help = "compare the run with the expected curve of this recipe (name or file)"
    add("--expect", metavar="RECIPE", help=expect_help)
    add("--png", metavar="FILE", type=Path, help="file of the plot (report.png of the first run)")
    add("--html", metavar="FILE", type=Path, help="file of the page (report.html of the first run)")
    sample_help = "largest size of the samples' tokens in the page, in MiB (16)"
    add("--sample-mib", metavar="MIB", type=float, default=16.0, help=sample_help)
    args = parser.parse_args(argv)
    if args.expect and len(args.run_dirs) > 1:
        parser.error("--expect compares one run; give one RUN_DIR")
    png, page = args.png or args.run_dirs[0] / "report.png", args.html or args.run_dirs[0] / "report.html"
    try:
        expected = read_recipe(args.expect).expected() if args.expect else []
        paths = [path for path in (args.before, *args.run_dirs) if path is not None]
        several = len(args.run_dirs) > 1
        runs = read_each(paths, read_run) if several else {path: read_run(path) for path in paths}
        args.run_dirs = [path for path in args.run_dirs if path in runs]
        if not args.run_dirs:
            raise ValueError("none of the run directories can be read.")
        print(table(runs))
        met = judge(runs[args.run_dirs[0]], expected)
        summaries = {path: _cells(path, records) for path, records in runs.items()}
        write_page(runs, summaries, page, sample_mib=args.sample_mib)
        print(f"page: {page}")
        if not several:
            why_none = draw(runs[args.run_dirs[0]], png)
        else:
            why_none = compare({path.name: runs[path] for path in args.run_dirs}, png)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {sentence_of(error)}")
    print(f"no plot: {why_none}; the page has all metrics" if why_none else f"plot: {png}")
    return 0 if met else UNMET_EXIT


def judge(records: list[dict], expected: list[Expected]) -> bool:
    """Print a verdict for each expected point; return whether the run meets all of them."""
    rows = [("metric", "step", "expected", "found", "verdict")]
    for point in expected:
        value = dict(metric_points(records, point.metric)).get(point.step)
        found = "-" if value is None else f"{value:.4f}"
        bounds, verdict = f"{point.low:g} to {point.high:g}", _verdict(point, value, records[-1][STEP])
        rows.append((point.metric, str(point.step), bounds, found, verdict))
    if expected:
        print(aligned(rows))
    return all(row[-1] == "met" for row in rows[1:])


def _verdict(point: Expected, value: float | None, last_step: int) -> str:
    if value is None:
        return "missing" if last_step >= point.step else "not reached"
    if value < point.low:
        return "too low"
    return "met" if value <= point.high else "too high"


def read_run(run_dir: Path) -> list[dict]:
    """Return the records of a run. Raises ValueError if there are none."""
    path = run_dir / FILE_NAME
    refuse_missing(run_dir)
    why = why_no_step(run_dir)
    if not path.is_file():
        why = why or "it is not a run directory (lockstep status lists them), or no step has ended"
        raise ValueError(f"{run_dir} holds no {FILE_NAME}: {why}.")
    records = read_records(path)
    if not records:
        raise ValueError(f"{path} holds no record yet: {why or 'no step has ended'}.")
    return records


def metric_points(records: list[dict], name: str) -> list[Point]:
    return [(record[STEP], record[name]) for record in records if record.get(name) is not None]


def reward_points(records: list[dict]) -> list[Point]:
    return metric_points(records, REWARD)


def accuracy_points(records: list[dict]) -> dict[str, list[Point]]:
    """Return the held-out accuracy by data source."""
    points: dict[str, list[Point]] = {}
    for record in records:
        for source, value in accuracies(record).items():
            if value is not None:
                points.setdefault(source, []).append((record[STEP], value))
    return points


def table(runs: dict[Path, list[dict]]) -> str:
    """Return a table with a column per run; each number is shown with its step."""
    columns = {path: _cells(path, records) for path, records in runs.items()}
    sources = sorted({source for records in runs.values() for source in accuracy_points(records)})
    names = ["run directory", "steps", "wall time, first to last record"]
    names += [f"accuracy {when}, {source}" for source in sources for when in ("before", "after")]
    names += ["mean reward, first", "mean reward, last"]
    rows = [[name] + [cells.get(name, "-") for cells in columns.values()] for name in names]
    return aligned(rows)


def aligned(rows: list) -> str:
    """Return the rows as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def _cells(run_dir: Path, records: list[dict]) -> dict[str, str]:
    cells = {"run directory": str(run_dir), "steps": str(records[-1][STEP])}
    times = [record["time"] for record in records if record.get("time") is not None]
    if len(times) > 1:
        cells["wall time, first to last record"] = _duration(times[-1] - times[0])
    for source, points in accuracy_points(records).items():
        if points[0][0] == 0:
            cells[f"accuracy before, {source}"] = _at_step(points[0])
        if points[-1][0] > 0:
            cells[f"accuracy after, {source}"] = _at_step(points[-1])
    rewards = reward_points(records)
    if rewards:
        cells["mean reward, first"], cells["mean reward, last"] = _at_step(rewards[0]), _at_step(rewards[-1])
    return cells


def _at_step(point: Point) -> str:
    step, value = point
    return f"{value:.4f} (step {step})"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def pyplot() -> ModuleType:
    """Return Matplotlib's pyplot for drawing into files. Raises ValueError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("the plot needs matplotlib: pip install 'lockstep-rl[report]'.") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(records: list[dict], png: Path) -> str:
    """Plot reward and accuracy of a run. Return why there is no plot; "" if there is one."""
    plt = pyplot()
    rewards, by_source = reward_points(records), accuracy_points(records)
    if not rewards and not by_source:
        return f"the records hold neither {REWARD} nor val-core/*/acc/mean@1"
    figure, left = plt.subplots(figsize=(8, 4.5), dpi=150)
    lines = []
    if rewards:
        marker = "." if len(rewards) <= 100 else None  # many would hide the line
        style = dict(color="tab:blue", linewidth=1, marker=marker, markersize=4)
        lines += left.plot(*zip(*rewards), label="mean reward (training)", **style)
        left.set_ylabel("mean reward (training)")
    right = left.twinx() if rewards and by_source else left
    colors = itertools.cycle(("tab:orange", "tab:green", "tab:red", "tab:purple"))
    for (source, points), color in zip(by_source.items(), colors):
        style = dict(color=color, linewidth=2, marker="o", markersize=5)
        lines += right.plot(*zip(*points), label=f"held-out accuracy, {source}", **style)
    if by_source:
        right.set_ylabel("held-out accuracy")
        right.set_ylim(-0.03, 1.03)
    if all(0 <= value <= 1 for _, value in rewards):
        left.set_ylim(-0.03, 1.03)  # equal scales, so that the curves can be compared
    left.set_xlabel("training step")
    left.grid(alpha=0.3)
    figure.legend(handles=lines, loc="upper center", ncols=min(len(lines), 3), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(png)
    plt.close(figure)
    return ""


def compare(runs: dict[str, list[dict]], png: Path) -> str:
    """Plot the held-out accuracy of several runs, by name. Return why there is no plot, or ""."""
    curves = {}
    for name, records in runs.items():
        by_source = accuracy_points(records)
        for source, points in by_source.items():
            curves[f"{name} {source}" if len(by_source) > 1 else name] = points
    if not curves:
        return "the records hold no val-core/*/acc/mean@1"
    draw_curves(curves, png, label="held-out accuracy")
    return ""


def draw_curves(curves: dict[str, list[Point]], png: Path, *, label: str) -> None:
    """Plot a curve for each name."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5), dpi=150)
    for number, (name, points) in enumerate(curves.items()):
        style = ("-", "--", ":")[number // 10 % 3]
        axes.plot(*zip(*points), style, color=f"C{number % 10}", linewidth=1.5, marker=".", label=name)
    axes.set_xlabel("training step")
    axes.set_ylabel(label)
    if all(0 <= value <= 1 for points in curves.values() for _, value in points):
        axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, ncols=2, loc="lower right")
    figure.tight_layout()
    figure.savefig(png)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
