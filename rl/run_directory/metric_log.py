"""The metrics of a run: per step a JSON object in `metrics.jsonl`, which trackers follow, and a console line.

Metric names are verl's, so that its dashboards can be used; metrics.yaml has all of them.
Nothing here is collective: the metrics given to `write` are already for the whole run, and only rank 0
has a `MetricLog`.
"""

import json
import logging
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.run_directory.delayed_writes import DelayedWrites

if TYPE_CHECKING:
    from rl.run_directory.trackers import TrackerThread

log = logging.getLogger(__name__)

STEP = "training/global_step"
FILE_NAME = "metrics.jsonl"

CLOSE_S = 15.0
"""Maximum wait for the followers at the end of a run, in seconds. It is shorter than the time for which the
other ranks wait for rank 0 when a stopped run exits (`rl.runtime.session.EXIT_TIMEOUT`)."""

MAX_COLUMNS = 176
"""Maximum width of a step's console line, in columns."""

TIMING_LABELS = {
    "gen": "gen",
    "update_actor": "train",
    "old_log_prob": "logp",
    "update_weights": "refit",
    "reward": "score",
    "ref": "ref",
    "adv": "adv",
}
"""Labels of timing_s/<key> in the console line, the most important first; others keep their names."""

HIDDEN_TIMINGS = {"step", "agreement"}
"""Timings that the console line does not list: the whole step, which has its own field, and a very short
one."""

RARE_TIMINGS = {"save_checkpoint": "save", "testing": "val"}
"""Timings of only some steps; they are at the end of the line."""

RARE_COLUMNS = len(" | val 12.3 s acc 0.123")
"""Columns reserved for RARE_TIMINGS in every line, so that all lines of a run show the same timings."""


class MetricLog:
    """Writes the metrics of a run into its directory. For rank 0 only; not collective.

    Args:
        directory: the run directory, created if missing, for `metrics.jsonl`.
        resume_step: the step after which the run continues. Records of later steps are dropped, because these
            steps are repeated. None: a new run with an empty file.
        followers: threads that read the file as it grows (`rl.run_directory.trackers`).
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        resume_step: int | None,
        followers: "Sequence[TrackerThread]" = (),
    ):
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        keep_lines_up_to(path, resume_step)
        self.last_step = max((record[STEP] for record in read_records(path)), default=-1)
        """Step of the last record."""
        self._writes = DelayedWrites(path)
        self._not_finite: set[str] = set()
        self._followers = followers
        for follower in followers:
            follower.start(path, resume_step)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append the record of a step. If the disk is full, keep the record and try again later.

        The record is strict JSON in one line: the step, `time` (Unix time in seconds), then the metrics by
        name. NaN and infinity become null, with one warning per metric.
        """
        if step <= self.last_step:
            raise ValueError(
                f"metric log check: step {step} was logged before, and step {self.last_step} was the last "
                "one: steps are repeated, or the records after the resumed step were not dropped."
            )
        self.last_step = step
        record: dict[str, float | None] = {STEP: step, "time": round(time.time(), 3)}
        for name in sorted(metrics.keys() - record.keys()):
            value = metrics[name] if type(metrics[name]) is int else float(metrics[name])
            if not math.isfinite(value):
                self._warn_not_finite(name, value, step)
            record[name] = value if math.isfinite(value) else None
        self._writes.append(step, json.dumps(record, allow_nan=False))
        for follower in self._followers:
            follower.note(step)

    def _warn_not_finite(self, name: str, value: float, step: int) -> None:
        if name not in self._not_finite:
            self._not_finite.add(name)
            log.warning(
                "%s is %s at step %d; %s has null for it (logged once per metric)",
                name,
                value,
                step,
                FILE_NAME,
            )

    def close(self) -> None:
        """Write the waiting records, and wait at most CLOSE_S for all followers together."""
        self._writes.close()
        for follower in self._followers:
            follower.finish()
        end = time.monotonic() + CLOSE_S
        for follower in self._followers:
            follower.wait(max(end - time.monotonic(), 0.0))


def read_records(path: str | os.PathLike) -> list[dict]:
    """Return the records of a `metrics.jsonl`, in the order of the file; None for values that are not finite.

    A last line without a newline is incomplete (being written, or cut short by a crash) and is left out. A
    line that is not a JSON object with a step is left out with a warning. Raises OSError if the file is
    unreadable.
    """
    found = [parse_record(line) for line in _whole_lines(Path(path))]
    if None in found:
        log.warning(
            "%s: %d lines are not JSON objects with a number %r and are skipped, the first is line %d",
            path,
            found.count(None),
            STEP,
            found.index(None) + 1,
        )
    return [record for record in found if record is not None]


def _whole_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


def parse_record(line: str | bytes) -> dict[str, Any] | None:
    """Return the numbers of a line by name, None for values that are not finite; None for no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or number_of(record.get(STEP)) is None:
        return None
    return {name: number_of(value) for name, value in record.items()}


def number_of(value: object) -> int | float | None:
    """Return a value of a JSON file if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < 1e300 else None


def keep_lines_up_to(path: Path, step: int | None) -> None:
    """Drop the records of steps after `step`, or all if it is None. The file exists afterwards.

    The file has JSON lines with the key training/global_step.
    """
    kept = []
    lines = _whole_lines(path) if step is not None and path.exists() else []
    for number, line in enumerate(lines, start=1):
        record = parse_record(line)
        if record is None:
            # A node that crashed can leave such a line, which must not prevent the run from resuming.
            log.warning("%s, line %d is not a record and is dropped: %r", path, number, line[:80])
        elif record[STEP] <= step:
            kept.append(line + "\n")
    # The file is replaced in one rename, so that a job killed here leaves either the old file or the new
    # file.
    new = path.with_name(path.name + ".partial")
    with open(new, "w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def accuracies(metrics: dict[str, float], variable: str = "acc") -> dict[str, float]:
    """Return held-out means by data source: val-core/<data_source>/<variable>/mean@k with the smallest k.

    The score is under val-aux. The smallest k is that of the greedy responses, if there are any.
    """
    section = "aux" if variable == "score" else "core"
    form = re.compile(rf"val-{section}/(.+)/{variable}/mean@(\d+)")
    found = ((form.fullmatch(name), value) for name, value in metrics.items())
    largest_first = sorted(
        ((match[1], -int(match[2]), value) for match, value in found if match), key=lambda entry: entry[:2]
    )
    return {source: value for source, _, value in largest_first}  # the last entry of a source remains


def step_line(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    """Return the console line of a step: main metrics, seconds of the step and its phases, held-out accuracy.

    Missing metrics are left out; tok/s is per rank. Fields have fixed widths, and fields of only some steps
    are last, so that the lines of a run form columns. Timings beyond MAX_COLUMNS are left out.
    """
    fields = [f"step {step:{len(str(max_steps))}d}/{max_steps} |"]
    for label, names, form in (
        ("reward", ("critic/score/mean",), "{:6.3f}"),
        ("equal", ("reward/frac_reward_zero_std",), "{:4.0%}"),
        ("len", ("response_length/mean",), "{:5.0f}"),
        ("tok/s", ("perf/throughput",), "{:5.0f}"),
        ("grad", ("actor/grad_norm",), "{:7.2g}"),
        ("loss", ("actor/pg_loss", "sft/loss"), "{:8.3g}"),
    ):
        present = [name for name in names if name in metrics]
        if present:
            fields.append(f"{label} {form.format(metrics[present[0]])}")
    head = " ".join(fields).removesuffix(" |")
    seconds = {
        name.removeprefix("timing_s/"): value
        for name, value in metrics.items()
        if name.startswith("timing_s/")
    }
    tail = _rare_field(seconds, metrics)
    room = MAX_COLUMNS - len(head) - max(len(tail), RARE_COLUMNS)
    return (head + _seconds_field(seconds, room) + tail)[:MAX_COLUMNS]


def _seconds_field(seconds: dict[str, float], room: int) -> str:
    """Return ' |  45.6 s: gen 12.3 train 30.1 ...', at most `room` columns wide."""
    if "step" not in seconds:
        return ""
    field = f" | {seconds['step']:5.1f} s:"
    others = seconds.keys() - TIMING_LABELS.keys() - RARE_TIMINGS.keys() - HIDDEN_TIMINGS
    for name in [*TIMING_LABELS, *sorted(others)]:
        if name in seconds:
            part = f" {TIMING_LABELS.get(name, name)} {_seconds(seconds[name])}"
            if len(field) + len(part) > room:
                break
            field += part
    return field.removesuffix(":")


def _rare_field(seconds: dict[str, float], metrics: dict[str, float]) -> str:
    """Return ' | val 12.3 s loss 1.23 acc 0.412 (3% failed) score 0.531'; several data sources are named.

    Without a score if it is the accuracy itself, for example because the reward function returns no `acc`.
    """
    parts = [
        f"{label} {_seconds(seconds[name]).strip()} s"
        for name, label in RARE_TIMINGS.items()
        if name in seconds
    ]
    if (loss := metrics.get("val/loss")) is not None:
        parts.append(f"loss {loss:.4g}")
    accuracy, failed = accuracies(metrics), accuracies(metrics, "failed")
    # Functions of reward.sources have scores of their own, and lines have no room for many sources.
    scores = {k: v for k, v in accuracies(metrics, "score").items() if k in accuracy and len(accuracy) < 3}
    if accuracy:
        notes = {source: f" ({share:.0%} failed)" for source, share in failed.items() if share}
        parts.append(_by_source("acc", accuracy, notes))
    if scores != accuracy and scores:
        parts.append(_by_source("score", scores, {}))
    return " | " + " ".join(parts) if parts else ""


def _by_source(label: str, values: dict[str, float], notes: dict[str, str]) -> str:
    """Return 'acc 0.412', or 'acc gsm8k 0.412 math 0.2' for several data sources."""
    parts = (
        (f"{value:.3f}" if len(values) == 1 else f"{source} {value:.3f}") + notes.get(source, "")
        for source, value in values.items()
    )
    return f"{label} {' '.join(parts)}"


def _seconds(value: float) -> str:
    return f"{value:4.1f}" if value < 99.95 else f"{value:4.0f}"
