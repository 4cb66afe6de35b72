"""Keeps the plan and the jobs of a run in `<run.dir>/anywhen`, on the disk that the nodes share.

    plan.json                 sizes with their layouts, limits, options of sbatch
    000003-asked.json         the third request: nodes, seconds, partition
    000003-job.json           the id of its job; missing if Slurm refused it
    000003-begun.json         its job started: time, step of the newest checkpoint, number of the start
    000003-ended.json         its ranks ended: time, exit code, seconds of a step, whether it was evicted
    000002-start.json         the second start of a job of the run: its request
    000002-evicted.json       the job of the second start is asked to save and end

A file is written complete and then linked to its name. Only one process can create a name, also on NFS, so
two jobs of the run cannot both make the third request. In the order of the starts, the files are the sequence
of the run's layouts.
"""

import json
import os
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from launch.anywhen.decision import Limits, Plan, Size
from rl.run_directory.status import FILE_NAME as STATUS
from rl.run_directory.status import read_object
from rl.sandbox.private_directory import make_private

DIRECTORY = "anywhen"
MAX_FAILURES = 3
"""Number of consecutive jobs that fail without a newer checkpoint, after which no job is requested."""


@dataclass(frozen=True)
class Submission:
    """A plan, and how its jobs are submitted."""

    plan: Plan
    run_dir: str
    name: str
    """Beginning of the jobs' names; the number of the request follows."""
    file: str
    """The batch file."""
    max_steps: int
    """Step after which the run is finished."""


@dataclass(frozen=True)
class JobRecord:
    """One request, and the events of its job so far."""

    number: int
    asked: dict[str, Any]
    job: str = ""
    begun: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)

    @property
    def spent_node_s(self) -> float:
        """Node-seconds of an ended job; of a job that was killed, its whole time limit."""
        if not self.begun:
            return 0.0
        seconds = self.ended["time"] - self.begun["time"] if self.ended else self.asked["seconds"]
        return float(self.asked["nodes"] * seconds)


def save(submission: Submission) -> Path:
    """Write the plan; return its directory."""
    directory = Path(submission.run_dir, DIRECTORY)
    make_private(directory)
    partial = directory / f"plan.{uuid.uuid4().hex}"
    partial.write_text(json.dumps(asdict(submission), indent=1) + "\n")
    partial.replace(directory / "plan.json")
    return directory


def load(directory: Path) -> Submission:
    """Return the plan, with measured seconds of steps where jobs of the run have taken some."""
    found = json.loads((directory / "plan.json").read_text())
    plan = found["plan"]
    sizes = [Size(**size) for size in plan["sizes"]]
    plan = Plan(**plan | {"sizes": _measured(sizes, records(directory)), "limits": Limits(**plan["limits"])})
    return Submission(**found | {"plan": plan})


def _measured(sizes: list[Size], jobs: list[JobRecord]) -> list[Size]:
    """Replace estimated seconds by measured ones; correct the others by the median of the factors."""
    measured = {
        size.nodes: [
            job.ended["step_s"]
            for job in jobs
            if job.asked["nodes"] == size.nodes and job.ended.get("step_s", 0) > 0
        ]
        for size in sizes
    }
    factors = [median(measured[size.nodes]) / size.step_s for size in sizes if measured[size.nodes]]
    factor = median(factors) if factors else 1.0
    return [
        replace(size, step_s=median(measured[size.nodes]) if measured[size.nodes] else size.step_s * factor)
        for size in sizes
    ]


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
        events = {
            event: read_object(directory / f"{path.name[:6]}-{event}.json")
            for event in ("asked", "job", "begun", "ended")
        }
        job = str(events.pop("job").get("job", ""))
        out.append(JobRecord(int(path.name[:6]), job=job, **events))
    return out


def begin(directory: Path, number: int) -> int:
    """Note the start of a job; return the number of starts of jobs of the run, with this one.

    Each number belongs to one start: its file is created by one job only.
    """
    step = int(read_object(directory.parent / STATUS).get("checkpoint_step") or 0)
    start = 1
    while not note(directory, start, "start", request=number):
        start += 1
    note(directory, number, "begun", step=step, start=start)
    return start


def is_over(directory: Path) -> str:
    """Return why the run needs no further job; empty if it needs one."""
    status = read_object(directory.parent / STATUS)
    if status.get("state") == "finished":
        return "the run is finished"
    if (directory.parent / "stop").exists():
        return "the file 'stop' stopped the run"
    ended = [job for job in records(directory) if job.ended and not job.ended["evicted"]][-MAX_FAILURES:]
    failed = [job for job in ended if job.ended["code"] not in (0, 75)]
    steps = {job.begun["step"] for job in failed} | {int(status.get("checkpoint_step") or 0)}
    if len(failed) == MAX_FAILURES and len(steps) == 1:
        return f"the ranks of {MAX_FAILURES} jobs failed without a newer checkpoint"
    return ""
