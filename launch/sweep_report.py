"""`lockstep sweep report SWEEP`: draw the curves of a sweep's runs in one picture, and write a page of
results.

SWEEP is the directory of a sweep, or several run directories. The command writes SWEEP/report.png and
SWEEP/report.html. The page is a single file that contains the picture and a table with a row per run: the
swept values, the state, and the first, best and last value of the metric. The metric is the held-out accuracy
if the runs have one, else the mean reward. You can select another metric of metrics.jsonl with --metric.
"""

import base64
import html
from pathlib import Path

from launch.runs import DIRECTORY, SWEEP, UNREADABLE_RUN, RunState, read_runs, read_sweep
from rl.config.command_line import make_parser
from rl.config.options import ConfigError, did_you_mean, show
from rl.run_directory.bad_entries import read_each
from rl.run_directory.status import refuse_missing
from tools.report import REWARD, Point, accuracy_points, draw_curves, metric_points, read_run, reward_points


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "directories", metavar="SWEEP", type=Path, nargs="+", help="directory of a sweep, or run directories"
    )
    parser.add_argument("--metric", metavar="NAME", default="", help="a metric's name, e.g. actor/entropy")
    parser.add_argument("--out", metavar="DIR", type=Path, help="output directory (the sweep's directory)")
    arguments = parser.parse_args(argv)
    values = swept_values(arguments.directories)
    runs = read_runs(values)
    readable = (run.directory for run in runs if run.state != UNREADABLE_RUN)
    records = read_each((path for path in readable if (path / "metrics.jsonl").is_file()), read_run)
    if not records:
        for directory in arguments.directories:
            refuse_missing(directory)
        raise ConfigError(
            f"no metrics.jsonl in {', '.join(map(str, values))}: no step has ended yet, or the runs lie in "
            "directories below; name those (lockstep status lists them)."
        )
    metric, curves = curves_of(records, arguments.metric)
    out = arguments.out or arguments.directories[0]
    draw_curves({path.name: points for path, points in curves.items()}, out / "report.png", label=metric)
    (out / "report.html").write_text(
        page(out.absolute().name, metric, runs, values, curves, out / "report.png")
    )
    print(f"picture: {out / 'report.png'}\npage: {out / 'report.html'}")
    print(f"{len(curves)} of {len(runs)} runs have {metric}")
    return 0


def swept_values(directories: list[Path]) -> dict[Path, dict]:
    """Return run directory -> swept values of its point. A run that is not part of a sweep has {}."""
    values: dict[Path, dict] = {}
    for directory in directories:
        values |= read_each([directory], _values_at).get(directory, {directory: {}})
    return values


def _values_at(directory: Path) -> dict[Path, dict]:
    if not (directory / DIRECTORY / SWEEP).is_file():
        return {directory: {}}
    return {directory / point["name"]: point["values"] for point in read_sweep(directory)["points"]}


def curves_of(records: dict[Path, list[dict]], metric: str) -> tuple[str, dict[Path, list[Point]]]:
    """Return the metric's name and each run's points. Raises ConfigError if no run has any."""
    if metric:
        name, curves = metric, {path: metric_points(some, metric) for path, some in records.items()}
    elif any(accuracy_points(some) for some in records.values()):
        source = next(source for some in records.values() for source in accuracy_points(some))
        name = f"held-out accuracy, {source}"
        curves = {path: accuracy_points(some).get(source, []) for path, some in records.items()}
    else:
        name, curves = REWARD, {path: reward_points(some) for path, some in records.items()}
    curves = {path: points for path, points in curves.items() if points}
    if not curves:
        if not metric:
            raise ConfigError("the runs have logged neither accuracy nor rewards yet; name another --metric")
        known = {each for some in records.values() for record in some for each in record}
        raise ConfigError(f"--metric={name} is in the log of no run{did_you_mean(name, known)}")
    return name, curves


def page(
    title: str,
    metric: str,
    runs: list[RunState],
    values: dict[Path, dict],
    curves: dict[Path, list[Point]],
    picture: Path,
) -> str:
    """Return the HTML page. The run with the highest last value of the metric comes first."""
    keys = list(dict.fromkeys(key for some in values.values() for key in some))
    head = ["run", *keys, "state", "step", "first", "best", "last"]

    def last(run: RunState) -> float:
        return curves[run.directory][-1][1] if run.directory in curves else float("-inf")

    rows = []
    for run in sorted(runs, key=last, reverse=True):
        points = [value for _, value in curves.get(run.directory, [])]
        numbers = [f"{value:.4g}" for value in (points[0], max(points), points[-1])] if points else ["-"] * 3
        own = [show(values[run.directory][key]) if key in values[run.directory] else "-" for key in keys]
        rows.append(
            [run.directory.name, *own, run.state, "-" if run.step is None else str(run.step), *numbers]
        )
    image = base64.b64encode(picture.read_bytes()).decode()
    return (
        "\n".join(
            [
                f"<!doctype html><meta charset='utf-8'>"
                f"<meta name='viewport' content='width=device-width'><title>{html.escape(title)}</title>",
                "<style>body{font:14px sans-serif;margin:1em}td,th{padding:2px 12px;text-align:left}"
                "img{max-width:100%}table{display:block;overflow-x:auto}</style>",
                f"<h1>{html.escape(title)}</h1><p>{html.escape(metric)}</p>",
                f"<img alt='curves' src='data:image/png;base64,{image}'>",
                "<table>",
                *(
                    "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
                    for tag, row in [("th", head), *(("td", row) for row in rows)]
                ),
                "</table>",
            ]
        )
        + "\n"
    )
