"""Keeps the plan and the jobs of a run in `<run.dir>/anywhen`, on the disk that the nodes share.

    plan.json                 sizes with their layouts, limits, batch file
    000003-asked.json         the third request: nodes, seconds, partition
    000003-submitted.json     the id of its job; missing if Slurm refused it
    000003-started.json       the queue showed that its job had started, but not begun
    000003-begun.json         its job started: time, step of the newest checkpoint
    000003-ended.json         its ranks ended: exit code, seconds of the job so far, seconds of a step
    000003-left.json          the job ended itself: its seconds
    000003-dropped.json       the run cancels the job while it waits: why Slurm holds it, newest checkpoint
    000003-doubted.json       the job was cancelled, and Slurm is asked by whom
    000003-cancelled.json     the user or an administrator cancelled the job
    000003-stopped.json       the file stop was written after this request
    stop                      why no further job is requested, until the file is removed

A file is written complete and then linked to its name. Only one process can create a name, also on NFS, so
two jobs of the run cannot both make the third request. In the order of their starts, the jobs tell the
sequence of the run's layouts.
"""

import json
import math
import os
import time
import uuid
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from launch.anywhen.decision import Plan, Size
from launch.anywhen.queue import NO_LAUNCH
from rl.config.elastic import JobLimits
from rl.run_directory.metric_log import read_records
from rl.run_directory.status import FILE_NAME as STATUS
from rl.run_directory.status import read_object
from rl.sandbox.private_directory import make_private

DIRECTORY = "anywhen"
STOP = "stop"
MAX_FAILURES = 3
"""Number of consecutive jobs that fail without a newer checkpoint, after which no job is requested."""
LEAVES = 3
"""Exit code of a job that leaves, because it is not needed."""
CONTINUES = (0, 75, 128 + 12)
"""Exit codes of ranks that did not fail; 0 also if Slurm ends the job. 140: the signal to stop came before
the program had started."""


@dataclass(frozen=True)
class JobRecord:
    """One request, and the events of its job so far; {} for an event that has not happened."""

    number: int
    asked: dict[str, Any]
    submitted: dict[str, Any] = field(default_factory=dict)
    started: dict[str, Any] = field(default_factory=dict)
    begun: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    dropped: dict[str, Any] = field(default_factory=dict)
    doubted: dict[str, Any] = field(default_factory=dict)
    cancelled: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, Any] = field(default_factory=dict)

    @property
    def job(self) -> str:
        """Id of the job; empty if sbatch was refused, or did not answer."""
        return str(self.submitted.get("job", ""))

    @property
    def spent_node_s(self) -> float:
        """Node-seconds of an ended job; of a job that was killed, also if it was only seen to start, its
        whole time limit."""
        seconds = (self.left or self.ended or self.asked)["seconds"]
        has_run = self.begun or (self.started and not self.dropped and not self.cancelled)
        return float(self.asked["nodes"] * seconds) if has_run else 0.0

    @property
    def end(self) -> tuple[float, bool, int] | None:
        """Time of the end, whether the job or its launch failed, and the newest checkpoint before it."""
        if self.ended:
            code, step = self.ended["code"], self.begun.get("step", -1)
            return None if code == LEAVES else (self.ended["time"], code not in CONTINUES, step)
        is_launched = self.begun or not self.dropped.get("held", "").startswith(NO_LAUNCH)
        return None if is_launched else (self.dropped["time"], True, self.dropped["step"])


EVENTS = {event.name for event in fields(JobRecord)} - {"number"}
"""Events that a record has; another version may write others."""


def save(plan: Plan, directory: Path, batch_file: str) -> None:
    """Write the plan and its batch file, and make the directory."""
    make_private(directory)
    texts = {directory / "plan.json": json.dumps(asdict(plan), indent=1), Path(plan.file): batch_file}
    for path, text in texts.items():
        partial = directory / f"partial.{uuid.uuid4().hex}"
        partial.write_text(text + "\n")
        partial.replace(path)


def load(directory: Path) -> Plan:
    """Return the plan, with the measured seconds of a step where jobs of the run have taken some.

    The other sizes' estimates are corrected by the median of the factors.
    """
    found = json.loads((directory / "plan.json").read_text())
    sizes, measured = [Size(**size) for size in found["sizes"]], defaultdict[int, list[float]](list)
    for job in records(directory):
        if job.ended.get("step_s", 0) > 0:
            measured[job.asked["nodes"]].append(job.ended["step_s"])
    known = {size.nodes: median(measured[size.nodes]) for size in sizes if size.nodes in measured}
    factor = median([known[size.nodes] / size.step_s for size in sizes if size.nodes in known] or [1.0])
    sizes = [replace(size, step_s=known.get(size.nodes, size.step_s * factor)) for size in sizes]
    return Plan(**found | {"sizes": sizes, "limits": JobLimits(**found["limits"])})


def note(directory: Path, number: int, event: str, **facts: Any) -> bool:
    """Create the file of an event; return False if it exists."""
    partial, path = directory / uuid.uuid4().hex, directory / f"{number:06d}-{event}.json"
    try:
        with partial.open("w") as file:
            file.write(json.dumps(facts | {"time": round(time.time(), 3)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)
    except FileExistsError:
        return path.samefile(partial)  # an NFS client repeats a request whose answer was lost
    finally:
        partial.unlink(missing_ok=True)  # also on a full disk
    return True


def records(directory: Path) -> list[JobRecord]:
    """Return the requests in their order."""
    found = defaultdict[int, dict[str, dict[str, Any]]](dict)
    for path in directory.glob("[0-9]*-*.json"):
        number, _, event = path.stem.partition("-")
        if event in EVENTS:
            found[int(number)][event] = read_object(path)
    return [JobRecord(number, **events) for number, events in sorted(found.items()) if "asked" in events]


def checkpoint_step(directory: Path) -> int:
    return int(read_object(directory.parent / STATUS).get("checkpoint_step") or 0)


def step_seconds(directory: Path, number: int) -> float:
    """Return the median seconds of the steps since a job began; 0 if there are none."""
    begun = next((job.begun for job in records(directory) if job.number == number), {})
    since, path = begun.get("time", math.inf), directory.parent / "metrics.jsonl"
    found = read_records(path) if path.is_file() else []
    steps = [record for record in found if (record.get("time") or 0.0) > since]
    return median([float(record.get("timing_s/step") or 0.0) for record in steps] or [0.0])


def is_over(directory: Path, plan: Plan) -> str:
    """Return why the run needs no further job; empty if it needs one."""
    status, path = read_object(directory.parent / STATUS), directory / STOP
    if status.get("state") == "finished" and (status.get("max_steps") or plan.max_steps) >= plan.max_steps:
        return "the run is finished"
    if (directory.parent / "stop").exists():
        return "the file 'stop' stopped the run"
    return f"{path.read_text()}; to continue, remove {path} and submit again" if path.exists() else ""


def stop(directory: Path, why: str) -> None:
    """Stop the run, and note after which request; the failures until then no longer count."""
    note(directory, max((job.number for job in records(directory)), default=0), "stopped")
    (directory / STOP).write_text(why)


def has_failed(directory: Path) -> bool:
    """Return whether the last MAX_FAILURES jobs that ended failed without a newer checkpoint.

    Those before the newest stop do not count.
    """
    jobs = records(directory)
    stopped = max((job.number for job in jobs if job.stopped), default=-1)
    last = sorted(job.end for job in jobs if job.end and job.number > stopped)[-MAX_FAILURES:]
    steps = {step for _, failed, step in last if failed} | {checkpoint_step(directory)}
    return len(last) == MAX_FAILURES and all(failed for _, failed, _ in last) and len(steps) == 1
