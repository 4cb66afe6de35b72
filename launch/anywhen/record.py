"""Keeps the plan and the jobs of a run in `<run.dir>/anywhen`, on the disk that the nodes share.

    plan.json                 sizes with their layouts, limits, batch file
    000003-asked.json         the third request: nodes, seconds, partition
    000003-job.json           the id of its job; missing if Slurm refused it
    000003-begun.json         its job started: time, step of the newest checkpoint
    000003-ended.json         its ranks ended: exit code, seconds of the job so far, seconds of a step
    000003-left.json          the job ended itself: its seconds
    000003-dropped.json       the run cancels the job while it waits
    000003-cancelled.json     the user cancelled the job
    000003-stopped.json       the file stop was written after this request
    stop                      why no further job is requested, until the file is removed

A file is written complete and then linked to its name. Only one process can create a name, also on NFS, so
two jobs of the run cannot both make the third request. In the order of their starts, the jobs tell the
sequence of the run's layouts.
"""

import json
import os
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from launch.anywhen.decision import Plan, Size
from rl.config.elastic import JobLimits
from rl.run_directory.status import FILE_NAME as STATUS
from rl.run_directory.status import read_object
from rl.sandbox.private_directory import make_private

DIRECTORY = "anywhen"
STOP = "stop"
MAX_FAILURES = 3
"""Number of consecutive jobs that fail without a newer checkpoint, after which no job is requested."""
LEAVES = 3
"""Exit code of a job that leaves, because it is not needed."""
NO_LAUNCH = -1
"""Code of a job that Slurm could not launch and cancelled; it counts as a failure."""
CONTINUES = (0, 75, 128 + 12)
"""Exit codes of ranks that did not fail. 140: the signal to stop came before the program had started."""


@dataclass(frozen=True)
class JobRecord:
    """One request, and the events of its job so far; {} for an event that has not happened."""

    number: int
    asked: dict[str, Any]
    begun: dict[str, Any]
    ended: dict[str, Any]
    left: dict[str, Any]
    job: str
    """Id of the job; empty if sbatch was refused, or did not answer."""

    @property
    def spent_node_s(self) -> float:
        """Node-seconds of an ended job; of a job that was killed, its whole time limit."""
        seconds = (self.left or self.ended or self.asked)["seconds"]
        return float(self.asked["nodes"] * seconds) if self.begun else 0.0


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
    sizes, measured = [Size(**size) for size in found["sizes"]], dict[int, list[float]]()
    for job in records(directory):
        if job.ended.get("step_s", 0) > 0:
            measured.setdefault(job.asked["nodes"], []).append(job.ended["step_s"])
    known = {size.nodes: median(measured[size.nodes]) for size in sizes if size.nodes in measured}
    factor = median([known[size.nodes] / size.step_s for size in sizes if size.nodes in known] or [1.0])
    sizes = [replace(size, step_s=known.get(size.nodes, size.step_s * factor)) for size in sizes]
    return Plan(**found | {"sizes": sizes, "limits": JobLimits(**found["limits"])})


def note(directory: Path, number: int, event: str, **facts: Any) -> bool:
    """Create the file of an event; return False if it exists."""
    partial, path = directory / uuid.uuid4().hex, directory / f"{number:06d}-{event}.json"
    with partial.open("w") as file:
        file.write(json.dumps(facts | {"time": round(time.time(), 3)}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, path)
    except FileExistsError:
        return path.samefile(partial)  # an NFS client repeats a request whose answer was lost
    finally:
        partial.unlink()
    return True


def records(directory: Path) -> list[JobRecord]:
    """Return the requests in their order."""
    out = []
    for path in sorted(directory.glob("[0-9]*-asked.json")):
        number = path.name[:6]
        asked, begun, ended, left, job = (
            read_object(directory / f"{number}-{event}.json")
            for event in ("asked", "begun", "ended", "left", "job")
        )
        out.append(JobRecord(int(number), asked, begun, ended, left, str(job.get("job", ""))))
    return out


def checkpoint_step(directory: Path) -> int:
    return int(read_object(directory.parent / STATUS).get("checkpoint_step") or 0)


def is_over(directory: Path, plan: Plan) -> str:
    """Return why the run needs no further job; empty if it needs one."""
    status, stop = read_object(directory.parent / STATUS), directory / STOP
    if status.get("state") == "finished" and (status.get("max_steps") or plan.max_steps) >= plan.max_steps:
        return "the run is finished"
    if (directory.parent / "stop").exists():
        return "the file 'stop' stopped the run"
    return f"{stop.read_text()}; to continue, remove {stop} and submit again" if stop.exists() else ""


def has_failed(directory: Path) -> bool:
    """Return whether the last MAX_FAILURES jobs with ranks failed without a newer checkpoint.

    Those before the newest stop do not count.
    """
    stopped = max((int(path.name[:6]) for path in directory.glob("[0-9]*-stopped.json")), default=-1)
    ended = [job for job in records(directory) if job.ended.get("code", LEAVES) != LEAVES]
    ended = [job for job in ended if job.number > stopped][-MAX_FAILURES:]
    failed = [job for job in ended if job.ended["code"] not in CONTINUES]
    steps = {job.begun.get("step") for job in failed} | {checkpoint_step(directory)}
    return len(failed) == MAX_FAILURES and len(steps) == 1
