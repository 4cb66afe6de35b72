"""Finds the state of runs from their directories and from Slurm's queue.

It reads the files of a run (`status.json`, `metrics.jsonl`, `heartbeat/`) and the file of submissions that
the launch commands write (`launch/jobs.jsonl`).
"""

import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch import slurm
from launch.arguments import warn
from rl.config.options import ConfigError
from rl.faults.process import is_dead
from rl.run_directory.bad_entries import in_words, read_each, read_lines
from rl.run_directory.metric_log import number_of, parse_record
from rl.run_directory.status import read_object

DIRECTORY = "launch"
"""Subdirectory of a run or of a sweep that holds batch files, logs and the list of submissions."""
JOBS, SWEEP = "jobs.jsonl", "sweep.json"
LOCK = "lock.json"
"""As in `rl.faults.lock`, whose import takes seconds. A run that ends itself removes the file."""
RANK_LOGS = ".ranks"
"""Suffix of the directory in which slurm/job.sh keeps the rank logs and a copy of the run's status.json, for
example x-17.ranks for job 17 with the name x."""
SILENT_S = 300.0
"""A run whose job is not in the queue counts as lost after this many seconds without a heartbeat."""
UNREADABLE_RUN = "unreadable"
"""State of a run with files that cannot be read."""
STATUS = dict(state="", step=None, max_steps=None, time=None, restarts=None, job="", reason="")
"""Fields of status.json; a file of another version may lack some of them."""
UNFINISHED = ("stopped", "failed", "lost", "unstarted")
"""States of runs that do not continue by themselves."""


@dataclass(frozen=True)
class RunState:
    """The state of one run; None for unknown fields."""

    directory: Path
    state: str
    """queued, running, stopped (can continue), finished, failed, lost (its end was not reported), unstarted,
    unreadable."""
    step: int | None = None
    max_steps: int | None = None
    reward: float | None = None
    """Mean score of the last step."""
    silent_s: float | None = None
    """Seconds since the oldest heartbeat of any rank, for a run in progress."""
    attempts: int | None = None
    """Number of starts of its job."""
    job: str = ""
    reason: str = ""


def find_runs(directory: Path) -> list[Path]:
    """Return the run directories among `directory` itself and the directories up to two levels below it.

    For a sweep, the result has all points, including points that have no directory yet.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"there is no directory {directory} (working directory {Path.cwd()}); name a run, a sweep, or a "
            "directory that holds them."
        )
    places = (directory, *sorted(directory.glob("*/")), *sorted(directory.glob("*/*/")))
    found = read_each((place for place in places if place.suffix != RANK_LOGS), _runs_at)
    return list(dict.fromkeys(itertools.chain.from_iterable(found.values())))


def _runs_at(place: Path) -> list[Path]:
    """Return the run directories of a path: all points if it is a sweep, itself if it is a run, else none."""
    if (place / DIRECTORY / SWEEP).is_file():
        return [place / point["name"] for point in read_sweep(place)["points"]]
    files = (place / "status.json", place / "metrics.jsonl", place / DIRECTORY / JOBS)
    return [place] if any(file.is_file() for file in files) else []


def read_sweep(directory: Path) -> dict:
    """Return the record of `launch sweep`: name, config and points. Raises ConfigError if there is none."""
    path = directory / DIRECTORY / SWEEP
    if not path.is_file():
        raise ConfigError(f"{directory} holds no {DIRECTORY}/{SWEEP}; it is not the directory of a sweep.")
    try:
        record = json.loads(path.read_text())
        points = record["points"]
        record["points"] = [dict(name=str(p["name"]), values=dict(p["values"])) for p in points]
        return record
    except Exception as error:
        raise ConfigError(f"{path} is not the record of a sweep: {in_words(error)}.") from error


def note_job(directory: Path, job: str, **facts: Any) -> None:
    """Append a submission to the list in a `launch` directory."""
    with (directory / JOBS).open("a") as file:
        file.write(json.dumps({"job": job, "time": round(time.time(), 3), **facts}) + "\n")


def noted_jobs(directory: Path) -> list[dict]:
    """Return the submissions in a `launch` directory, oldest first."""
    path = directory / JOBS
    if not path.is_file():
        return []
    usual: dict = {"tasks": [], "array": False}
    return read_lines(path, lambda noted: usual | noted | {"job": str(noted["job"])})


def read_runs(directories: Iterable[Path], *, needs_queue: bool = False) -> list[RunState]:
    """Return the state of each run, with one call of squeue.

    If Slurm does not answer, a warning is printed and the states follow from the files alone. With
    `needs_queue`, SlurmError is raised instead.
    """
    reported = [_readable(directory) for directory in directories]
    readable = {run.directory: run for run in reported if run.state != UNREADABLE_RUN}
    noted = read_each(readable, lambda directory: _jobs_of(readable[directory]))
    jobs = [noted.get(run.directory, [run.job] if run.job else []) for run in reported]
    queue: dict[str, str] | None = None
    try:
        queue = slurm.states(job for some in jobs for job in some)
    except slurm.SlurmError as error:
        if needs_queue:
            raise
        reason = " ".join(str(error).split())
        warn(f"Slurm's queue is unavailable, so states follow from the runs' files alone: {reason}")
    return [_settled(run, some, queue) for run, some in zip(reported, jobs)]


def _readable(directory: Path) -> RunState:
    """Return the state of a run; the state is UNREADABLE_RUN if its files cannot be read."""
    try:
        return _reported(directory)
    except Exception as error:
        return RunState(directory, UNREADABLE_RUN, reason=in_words(error))


def _reported(directory: Path) -> RunState:
    """Return the state that the run's own files report."""
    (directory / "status.json").is_file()  # raises an error if the directory is closed to this user
    status = STATUS | read_object(directory / "status.json")
    last = _last_record(directory / "metrics.jsonl")
    step = last.get("training/global_step")
    if not status["state"]:
        state = "running" if last else "unstarted"
        silent_s = _silence(directory, last.get("time"))
        return RunState(directory, state, step=step, reward=last.get("critic/score/mean"), silent_s=silent_s)
    return RunState(
        directory,
        str(status["state"]),
        step=_count(status["step"]),
        max_steps=_count(status["max_steps"]),
        reward=last.get("critic/score/mean"),
        silent_s=_silence(directory, number_of(status["time"])) if status["state"] == "running" else None,
        attempts=None if status["restarts"] is None else status["restarts"] + 1,
        job=str(status["job"]),
        reason=str(status["reason"]),
    )


def _count(value: object) -> int | None:
    number = number_of(value)
    return None if number is None else int(number)


def _silence(directory: Path, otherwise: float | None) -> float | None:
    """Return the seconds since the last heartbeat of the rank that has been silent longest.

    otherwise: Unix time that is used if there are no heartbeats. If a sweep runs in one job, the heartbeats
    of its points are in the directory of the sweep, one level above the directory of a point.
    """
    oldest = []
    for place in (directory, directory.parent):
        records = map(read_object, place.glob("heartbeat/rank_*.json"))
        times = (record.get("time") for record in records)
        if beats := [time for time in times if isinstance(time, (int, float))]:
            oldest.append(min(beats))
    last = max(oldest, default=otherwise)
    return None if last is None else max(0.0, time.time() - last)


def _jobs_of(run: RunState) -> list[str]:
    """Return the ids of the run's jobs: the job in its status, and the newest job submitted for the run."""
    own = noted_jobs(run.directory / DIRECTORY)[-1:]
    jobs = [run.job, *(noted["job"] for noted in own)]
    sweep = run.directory.parent / DIRECTORY
    if (sweep / SWEEP).is_file():
        points = [point["name"] for point in read_sweep(run.directory.parent)["points"]]
        task = points.index(run.directory.name) if run.directory.name in points else None
        mine = [noted for noted in noted_jobs(sweep) if task in noted["tasks"]]
        jobs += [f"{noted['job']}_{task}" if noted["array"] else noted["job"] for noted in mine[-1:]]
    return [job for job in dict.fromkeys(jobs) if job]


def _settled(run: RunState, jobs: list[str], queue: dict[str, str] | None) -> RunState:
    """Return the state that follows from the run's files and Slurm's queue (None: unavailable)."""
    known = [(job, queue[job]) for job in jobs if queue and job in queue]
    if run.state == "finished" or (known and known[-1][1] == "COMPLETING"):
        return run
    if known:
        return replace(run, job=known[-1][0], state="running" if known[-1][1] == "RUNNING" else "queued")
    job = run.job or (jobs[-1] if jobs else "")
    if run.state == "running":
        places = (run.directory, run.directory.parent)  # a sweep in one job has the lock of its points
        locks = [read_object(place / LOCK) for place in places]
        was_killed = is_dead(max(locks, key=lambda lock: lock.get("time", 0)))
        in_slurm = bool(job) and queue is not None and slurm.available()
        if was_killed or in_slurm or (run.silent_s is not None and run.silent_s > SILENT_S):
            return replace(run, job=job, state="lost")
    return replace(run, job=job)


def _last_record(path: Path) -> dict:
    """Return the last complete record of a metrics file, or {}."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        lines = file.read().splitlines()
    records = map(parse_record, reversed(lines))  # skips lines that were cut off: the first and the last
    return next((record for record in records if record is not None), {})
