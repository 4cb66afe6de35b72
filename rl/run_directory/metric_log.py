"""The numbers of a run: one JSON object per step in `metrics.jsonl`, TensorBoard event files, one console line per step.

Metric names are verl's, so that dashboards and habits carry over: actor/*, critic/*, response_length/*, timing_s/*
(seconds), perf/throughput (tokens per second and rank), val-core/<data_source>/acc/mean@1, training/global_step. Nothing
here is collective: the metrics given to `write` are already those of the whole run, and only rank 0 has a `MetricLog`.
"""

import json
import logging
import math
import os
import re
import time
from pathlib import Path

log = logging.getLogger(__name__)

STEP = "training/global_step"
FILE_NAME = "metrics.jsonl"

MAX_COLUMNS = 165
"""Widest console line of a step."""

PHASES = {
    "gen": "gen",
    "update_actor": "train",
    "old_log_prob": "logp",
    "update_weights": "refit",
    "reward": "score",
    "ref": "ref",
    "adv": "adv",
}
"""timing_s/<key> -> its name in the console line, the most important first. Other phases follow under their own names."""

UNSHOWN = {"step", "agreement"}
"""Not in that list: the whole, and what is too little to be of interest."""

RARE_PHASES = {"save_checkpoint": "save", "testing": "val"}
"""The phases that only some steps have; they stand at the end of the line."""

RARE_COLUMNS = len(" | val 12.3 acc 0.123")
"""Columns kept free for them in every line, so that the phases shown are the same in all lines of a run."""


class MetricLog:
    """Writes the metrics of a run into its directory. For rank 0 only; not collective.

    Args:
        directory: the run directory; created if missing. Gets `metrics.jsonl` and `tensorboard/`.
        tensorboard: write TensorBoard event files too.
        resume_step: the step that the run continues after: records of later steps, written between that checkpoint and
            the crash, are dropped, as those steps will be taken again. None: a new run, the file starts anew.
    """

    def __init__(self, directory: str | os.PathLike, *, tensorboard: bool, resume_step: int | None):
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        keep_lines_up_to(path, resume_step)
        self.last_step = max((record[STEP] for record in read_records(path)), default=-1)
        """Of the records that are there already."""
        self._file = open(path, "a", encoding="utf-8")
        self._not_finite: set[str] = set()
        self._tensorboard = None
        if tensorboard:
            # Imported here, because it takes seconds and is not wanted in every run.
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard then hides the points of that step and later ones, in event files of earlier starts.
            purge_step = 0 if resume_step is None else resume_step + 1
            self._tensorboard = SummaryWriter(str(directory / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append the record of a step and flush it, so that a reader sees it at once.

        The record is strict JSON in one line: the step, `time` (Unix time in seconds), then the metrics by name. NaN and
        infinity become null, said once per metric in the log.
        """
        record = {STEP: step, "time": round(time.time(), 3)}
        for name in sorted(metrics.keys() - record.keys()):
            value = metrics[name] if type(metrics[name]) is int else float(metrics[name])
            if not math.isfinite(value):
                self._say_not_finite(name, value, step)
                record[name] = None
                continue  # TensorBoard would warn at every step
            record[name] = value
            if self._tensorboard is not None:
                self._tensorboard.add_scalar(name, value, step)
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def _say_not_finite(self, name: str, value: float, step: int) -> None:
        if name not in self._not_finite:
            self._not_finite.add(name)
            log.warning(
                "%s is %s at step %d; %s has null for it (said once per metric)", name, value, step, FILE_NAME
            )

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_records(path: str | os.PathLike) -> list[dict]:
    """The records of a `metrics.jsonl`, in the order of the file.

    A last line without its newline is one that is being written, or that a crash cut short; it is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: another line is not a JSON object with a step; the message names it.
    """
    path = Path(path)
    records = []
    for number, line in enumerate(_whole_lines(path), start=1):
        record = _parse(line)
        if record is None:
            raise ValueError(
                f"{path}, line {number} is not a JSON object with a number {STEP!r}: {line[:80]!r}."
            )
        records.append(record)
    return records


def _whole_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


def _parse(line: str) -> dict | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    valid = isinstance(record, dict) and isinstance(record.get(STEP), (int, float))
    return record if valid else None


def keep_lines_up_to(path: Path, step: int | None) -> None:
    """Drop the records of later steps from a file of JSON lines with the key training/global_step, in one rename; step
    None: all of them. The file is there afterwards."""
    _replace(path, [] if step is None or not path.exists() else _lines_up_to(path, step))


def _lines_up_to(path: Path, step: int) -> list[str]:
    kept = []
    for number, line in enumerate(_whole_lines(path), start=1):
        record = _parse(line)
        if record is None:
            # A node that died can leave such a line. A run must not fail to come back for the sake of its log.
            log.warning("%s, line %d is not a record and is dropped: %r", path, number, line[:80])
        elif record[STEP] <= step:
            kept.append(line)
    return kept


def _replace(path: Path, lines: list[str]) -> None:
    # Through a second file and a rename, so that a job killed here leaves either the old file or the new one.
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def accuracies(metrics: dict[str, float]) -> dict[str, float]:
    """Held-out accuracy by data source: the metrics called val-core/<data_source>/acc/mean@k, of the smallest k."""
    found = ((re.fullmatch(r"val-core/(.+)/acc/mean@(\d+)", name), value) for name, value in metrics.items())
    largest_first = sorted(
        ((match[1], -int(match[2]), value) for match, value in found if match), key=lambda entry: entry[:2]
    )
    return {source: value for source, _, value in largest_first}  # the last of a source stays


def step_line(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    """The console line of a step: headline numbers, seconds of the step and of its phases, held-out accuracy.

    What `metrics` lacks is left out; tok/s is per rank. Fields have fixed widths and what only some steps have is last, so
    that the lines of a run stand in columns. Never wider than MAX_COLUMNS: phases for which there is no room are left out.
    """
    fields = [f"step {step:{len(str(max_steps))}d}/{max_steps} |"]
    for label, names, form in (
        ("reward", ("critic/score/mean",), "{:6.3f}"),
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
    tail = _rare_field(seconds, accuracies(metrics))
    room = MAX_COLUMNS - len(head) - max(len(tail), RARE_COLUMNS)
    return (head + _seconds_field(seconds, room) + tail)[:MAX_COLUMNS]


def _seconds_field(seconds: dict[str, float], room: int) -> str:
    """' |  45.6 s: gen 12.3 train 30.1 ...' of at most `room` columns."""
    if "step" not in seconds:
        return ""
    field = f" | {seconds['step']:5.1f} s:"
    for phase in list(PHASES) + sorted(seconds.keys() - PHASES.keys() - RARE_PHASES.keys() - UNSHOWN):
        if phase in seconds:
            part = f" {PHASES.get(phase, phase)} {_seconds(seconds[phase])}"
            if len(field) + len(part) > room:
                break
            field += part
    return field.removesuffix(":")


def _rare_field(seconds: dict[str, float], by_source: dict[str, float]) -> str:
    """' | val 12.3 acc 0.412'; data sources are named if there are several."""
    parts = [f"{name} {_seconds(seconds[phase])}" for phase, name in RARE_PHASES.items() if phase in seconds]
    if by_source:
        values = (
            f"{value:.3f}" if len(by_source) == 1 else f"{source} {value:.3f}"
            for source, value in by_source.items()
        )
        parts.append("acc " + " ".join(values))
    return " | " + " ".join(parts) if parts else ""


def _seconds(value: float) -> str:
    return f"{value:4.1f}" if value < 99.95 else f"{value:4.0f}"
