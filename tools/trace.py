"""Merge the timelines of a run's ranks into one trace per step, and print where the time went.

    lockstep train --config my.yaml trace.steps=[5]     a run that writes the timelines of step 5
    lockstep trace runs/grpo          every traced step
    lockstep trace runs/grpo --step 5 --ranks 0:7
    lockstep trace runs/grpo --torch  also operators and kernels of torch.profiler
    lockstep trace runs/grpo --cost   what tracing cost this run

It writes <run>/trace/step_<step>.json.gz, which https://ui.perfetto.dev opens. A process is a rank; its
tracks are phases, the main thread, the GPU, reward workers and other threads. Times are on rank 0's clock.
docs/traces.md says what to look for. The tool needs neither torch nor the machine of the run.
"""

import gzip
import json
import math
import re
import sys
import timeit
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import bounds, make_parser
from rl.config.options import listed
from rl.run_directory.bad_entries import read_each
from rl.run_directory.metric_log import FILE_NAME, STEP, read_records
from rl.run_directory.status import refuse_missing
from rl.runtime import tracing
from tools.report import aligned

TRACKS = ("phase", "main", "GPU")
"""The first tracks of a rank, in order."""
PROFILER_TRACK = 1000
"""Number of the first track of torch.profiler."""
RANK_FILE = re.compile(r"step_(\d+)_rank_(\d+)\.json")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of a run")
    both = "both included"
    parser.add_argument("--step", metavar="FIRST[:LAST]", type=bounds, help=f"only these steps, {both}")
    parser.add_argument("--ranks", metavar="FIRST:LAST", type=bounds, default=(0, math.inf), help=both)
    parser.add_argument("--torch", action="store_true", help="merge the traces of torch.profiler too")
    parser.add_argument("--cost", action="store_true", help="compare traced steps with the others")
    args = parser.parse_args(argv)
    try:
        refuse_missing(args.run_dir)
        steps = find(args.run_dir, args.step or (-math.inf, math.inf), args.ranks)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.cost:
        try:
            print(cost(args.run_dir, steps))
        except OSError as error:
            sys.exit(f"error: {error}")
        return 0
    for step, paths in sorted(steps.items()):
        of_ranks = read_each(paths, read_rank)
        paths, records = list(of_ranks), list(of_ranks.values())
        if not records:
            continue
        target = args.run_dir / "trace" / f"step_{step:06d}.json.gz"
        events = [event for record in records for event in chrome_events(record)]
        if args.torch:
            for path, record in zip(paths, records, strict=True):
                events += profiler_events(path, record)
        with gzip.open(target, "wt", encoding="utf-8", compresslevel=4) as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about(records)}, file)
        print(f"step {step}: {target}, {len(records)} ranks; {about(records)['clocks']}")
        print(aligned(table(records)))
    print("https://ui.perfetto.dev opens these files")
    return 0


def read_rank(path: Path) -> dict:
    """Return the timeline of a rank. Raises ValueError if the file is not a timeline."""
    record = json.loads(path.read_text())
    if not isinstance(record, dict) or not {"rank", "events", "clock_offset_ns"} <= record.keys():
        raise ValueError("it is not the timeline of a rank")
    return record


def find(run_dir: Path, steps: tuple[float, float], ranks: tuple[float, float]) -> dict[int, list[Path]]:
    """Return the files of the ranks by step, in the order of the ranks. Raises ValueError for none.

    steps, ranks: the first and the last one.
    """
    directory = run_dir / "trace"
    stored: dict[int, set[int]] = defaultdict(set)
    found: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(directory.glob("step_*_rank_*.json")):
        if match := RANK_FILE.fullmatch(path.name):
            number, rank = map(int, match.groups())
            stored[number].add(rank)
            if steps[0] <= number <= steps[1] and ranks[0] <= rank <= ranks[1]:
                found[number].append(path)
    wanted = f"trace.steps=[{steps[0]:g}]" if math.isfinite(steps[0]) else "trace.steps=[...]"
    remedy = f"run with {wanted}{logged(run_dir, steps[0])}."
    if not stored:
        raise ValueError(f"{directory} has no timelines; {remedy}")
    if not found:
        own = sorted(set.union(*stored.values()))
        raise ValueError(
            f"{directory} has no timelines of these steps and ranks; it has them of "
            f"step{'s' * (len(stored) > 1)} {listed(map(str, sorted(stored)), 'and')}, ranks {own[0]} to "
            f"{own[-1]}, so name one of them, or {remedy}"
        )
    return dict(found)


def logged(run_dir: Path, step: float) -> str:
    """Return the longest phases of a step in the log, as the end of a sentence; "" if it has none."""
    file = run_dir / FILE_NAME
    records = [record for record in read_records(file) if record[STEP] == step] if file.is_file() else []
    seconds = {
        name.removeprefix("timing_s/"): value
        for record in records
        for name, value in record.items()
        if name.startswith("timing_s/") and value is not None
    }
    longest = sorted(seconds, key=lambda name: -seconds[name])[:6]
    text = ", ".join(f"{name} {seconds[name]:.3g} s" for name in longest)
    return text and f"; without it the log has the seconds of each phase: {text}"


def chrome_events(record: dict) -> Iterator[dict]:
    """Yield the events of a rank in Chrome's format, with microseconds of rank 0's clock."""
    rank, error = record["rank"], record["clock_error_ns"] / 1e3
    name = f"rank {rank} ({', '.join(filter(None, (record['role'], record['host'])))})"
    yield meta("process_name", rank, name=name)
    yield meta("process_sort_index", rank, sort_index=rank)
    yield meta("process_labels", rank, labels=f"clock +-{error:.0f} us")
    others = sorted({event[0] for event in record["events"]} - set(TRACKS))
    numbers = {track: number for number, track in enumerate((*TRACKS, *others))}
    for track in {event[0] for event in record["events"]}:
        yield meta("thread_name", rank, numbers[track], name=track)
        yield meta("thread_sort_index", rank, numbers[track], sort_index=numbers[track])
    for track, name, begin, end, args in record["events"]:
        at = (begin + record["clock_offset_ns"]) / 1e3
        place = {"pid": rank, "tid": numbers[track], "ts": at, "dur": (end - begin) / 1e3}
        yield {"ph": "X", "name": name, "cat": track, **place, **({"args": args} if args else {})}


def meta(kind: str, rank: int, track: int = 0, **args: object) -> dict:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}


def profiler_events(path: Path, record: dict) -> Iterator[dict]:
    """Yield the events of a rank's torch.profiler traces, on tracks of the same rank."""
    shift_ns = record["clock_offset_ns"] - record["unix_minus_clock_ns"]
    for trace in sorted(path.parent.glob(f"{path.stem}.*.pt.trace.json")):
        made = json.loads(trace.read_text())
        shift = (made["baseTimeNanoseconds"] + shift_ns) / 1e3
        tracks: dict[tuple, int] = {}
        for event in made["traceEvents"]:
            if event["ph"] == "X":
                key = event["pid"], event["tid"]
                if key not in tracks:
                    tracks[key] = PROFILER_TRACK + len(tracks)
                    name = f"torch.profiler {' '.join(map(str, key))}"
                    yield meta("thread_name", record["rank"], tracks[key], name=name)
                yield event | {"pid": record["rank"], "tid": tracks[key], "ts": event["ts"] + shift}


def about(records: list[dict]) -> dict[str, str]:
    """Return what the trace says of itself."""
    error = max(record["clock_error_ns"] for record in records) / 1e3
    return {"clocks": f"times are of rank 0's clock, with an error of at most {error:.0f} us on any rank"}


def table(records: list[dict]) -> list[tuple[str, ...]]:
    """Return rows: seconds of each span of the main threads, over the ranks, and the slowest rank."""
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    counts: dict[str, int] = defaultdict(int)
    for record in records:
        for track, name, begin, end, _ in record["events"]:
            if track in ("main", "GPU"):
                name = name if track == "main" else f"GPU: {name}"
                seconds[name][record["rank"]] += (end - begin) / 1e9
                counts[name] += 1
    rows: list[tuple[str, ...]] = [("span", "count", "min s", "median s", "max s", "longest on rank")]
    for name, by_rank in sorted(seconds.items(), key=lambda item: -max(item[1].values())):
        longest = max(by_rank, key=lambda rank: by_rank[rank])
        values = by_rank.values()  # with roles, not every rank has every span
        figures = [f"{value:.3f}" for value in (min(values), median(values), max(values))]
        rows.append((name, str(counts[name]), *figures, str(longest)))
    return rows


def cost(run_dir: Path, steps: dict[int, list[Path]]) -> str:
    """Return what tracing costs: traced steps against the others, and the comparisons of an untraced step."""
    records = read_records(run_dir / FILE_NAME)
    times = {record[STEP]: record["time"] for record in records if record.get("time") is not None}
    # After the first step, which is slower; from line to line of the log, so that nothing is left out.
    seconds = {step: times[step] - times[step - 1] for step in times if step > 2 and step - 1 in times}
    traced, others = (
        [s for step, s in seconds.items() if (step in steps) is is_in] for is_in in (True, False)
    )
    if not traced or not others:
        raise SystemExit("error: --cost needs steps after the second, some traced and some not.")
    of_ranks = read_each((paths[0] for paths in steps.values()), read_rank)
    if not of_ranks:
        raise SystemExit("error: no timeline can be read.")
    spans = median(len(record["events"]) for record in of_ranks.values())
    each = median(timeit.repeat(empty_span, number=10_000, repeat=9)) / 10_000
    return (
        f"traced: median {median(traced):.4f} s of {len(traced)} steps; others: {median(others):.4f} s of "
        f"{len(others)}; ratio {median(traced) / median(others):.4f}\noff: {spans:.0f} spans x "
        f"{each * 1e9:.0f} ns are {spans * each / median(others):.5%} of a step"
    )


def empty_span() -> None:
    with tracing.span("name", number=1):
        pass


if __name__ == "__main__":
    sys.exit(main())
