"""Takes the turns of a run: inside each of its jobs, and on the login node with `submit --anywhen --stay`.

    python -m launch.anywhen.turns begin DIR NUMBER S     in a new job: wait for the trainer; print the layout
    python -m launch.anywhen.turns follow DIR             beside the ranks: a turn per minute
    python -m launch.anywhen.turns end DIR NUMBER S CODE  after the ranks: note the end, request a successor

DIR is `<run.dir>/anywhen`, S the seconds since the job's start. Nothing is requested while Slurm does not
answer, or answers what cannot be, because a request without a view of the queue could double a job.
"""

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from launch import slurm
from launch.anywhen import queue
from launch.anywhen.decision import (
    Decision,
    Plan,
    QueuedJob,
    QueueView,
    decide,
    is_followed,
    is_spent,
    size_of,
    takes_over,
)
from launch.anywhen.record import (
    LEAVES,
    MAX_FAILURES,
    NO_LAUNCH,
    STOP,
    JobRecord,
    checkpoint_step,
    has_failed,
    is_over,
    load,
    note,
    records,
)
from launch.runs import DIRECTORY as LOGS
from launch.runs import note_job
from rl.run_directory.metric_log import read_records

LONGEST_WAIT_S = 1800.0
"""Maximum wait of a new job for the end of the job that trains."""
POLL_S = 5.0
"""Seconds between two looks at the queue while a new job waits."""
SIGNAL_S = 20.0
"""Seconds between two signals to a job that is to stop."""
LAST_TURNS = 6
"""Number of turns for which an ended job that has no successor stays to request one. The pause before such a
request is at most four turns."""
PASSING = (ValueError, OSError, KeyError)
"""Errors of Slurm, of its output and of the disk, after which the next turn tries again."""


def turn(directory: Path, *, own: str = "", ends: bool = False) -> str:
    """Look at the queue once, and request a job if one is needed; return why the run is over, or ''.

    own: id of the job in which this runs. ends: whether that job is about to end, and counts as ended. Raises
    SlurmError if Slurm does not answer, and ValueError if it prints something else.
    """
    plan, number = load(directory), max((job.number for job in records(directory)), default=0) + 1
    found = view(directory, plan, own=own, ends=ends)
    spent = f"run.limits.node_hours={plan.limits.node_hours:g} allows none"
    if over := is_over(directory, plan) or (spent if is_spent(plan, found) else ""):
        _cancel(directory, [job for job in found.jobs if not job.started])
        return over
    _act(directory, plan, decide(plan, found), number)
    return ""


def view(directory: Path, plan: Plan, *, own: str = "", ends: bool = False, holes: bool = True) -> QueueView:
    """Return the queue and the progress of the run, as `turn` sees them; without holes, no node is idle.

    If the user cancelled a job of the run, the file `stop` is written.
    """
    jobs, now = records(directory), time.time()
    queued, cancelled = queue.jobs_of(plan)
    if own and own not in {job.id for job in queued}:
        raise slurm.SlurmError(f"squeue does not list job {own}, which runs; nothing is requested.")
    for job in jobs:
        for name in (name for name, number in cancelled if number == job.number and job.job in (name, "")):
            _note_cancelled(directory, job, name)
    ended = {job.number for job in jobs if job.ended}
    queued = [replace(job, has_ranks=job.number not in ended) for job in queued]
    queued = [job for job in queued if job.id != own or not ends]
    here, well = {job.number for job in queued}, {job.number for job in queued if not job.is_held}
    refused = next((n for n, job in enumerate(reversed(jobs)) if job.begun or job.number in well), len(jobs))
    return QueueView(
        now,
        queued,
        queue.idle_nodes(plan) if holes else {},
        lambda ask: queue.accepts(plan, ask),
        max(1, plan.max_steps - checkpoint_step(directory)),  # the run is not over, so that it needs a job
        sum(job.spent_node_s for job in jobs if job.number not in here),
        abs(now - jobs[-1].asked["time"]) if jobs else float("inf"),  # a clock may have been ahead
        min(refused, 1) if ends else refused,
    )


def _note_cancelled(directory: Path, job: JobRecord, name: str) -> None:
    """Stop the run if the user cancelled the job, and neither the run nor Slurm.

    name: the job's id.
    """
    is_dropped = not job.begun and (directory / f"{job.number:06d}-dropped.json").exists()
    is_noted = (directory / f"{job.number:06d}-cancelled.json").exists()
    if is_dropped or is_noted or job.ended.get("code") == NO_LAUNCH:
        return
    if not job.begun and queue.failed_to_launch(name):
        note(directory, job.number, "begun", step=checkpoint_step(directory))
        note(directory, job.number, "ended", code=NO_LAUNCH, seconds=0.0, step_s=0.0)
        _stop_if_failed(directory)
    elif note(directory, job.number, "cancelled"):
        _stop(directory, f"job {name} was cancelled")


def _act(directory: Path, plan: Plan, decision: Decision, number: int) -> None:
    """Cancel jobs and request one, unless another process of the run makes this request."""
    cancel, ask = decision
    if ask is not None and not note(directory, number, "asked", **asdict(ask)):
        return
    _cancel(directory, cancel)
    if ask is None:
        return
    if cancel and {job.id for job in queue.jobs_of(plan)[0]} & {job.id for job in cancel}:
        raise slurm.SlurmError("a job that was to make room has started; nothing is requested.")
    job = queue.submit(plan, ask, number)
    note(directory, number, "job", job=job)
    note_job(directory.parent / LOGS, job)
    print(f"anywhen: job {job} asks for {ask.nodes} nodes for {ask.seconds / 3600:.2f} h", flush=True)


def _cancel(directory: Path, jobs: Sequence[QueuedJob]) -> None:
    """Cancel waiting jobs, which nobody then takes for cancelled by the user."""
    for job in jobs:
        note(directory, job.number, "dropped")
    if jobs:
        slurm.run("scancel", "--state=PENDING", *(job.id for job in jobs))


def _stop(directory: Path, why: str) -> None:
    """Stop the run, and note after which request; the failures until then no longer count."""
    note(directory, max((job.number for job in records(directory)), default=0), "stopped")
    (directory / STOP).write_text(why)


def follow(directory: Path, turns: int | None = None, own: str = "") -> str:
    """Take a turn per minute until the run is over, or so many turns; return why it is over, or ''."""
    taken, turn_s = 0, Plan.turn_s
    while True:
        try:
            turn_s = load(directory).turn_s
            if over := turn(directory, own=own):
                return over
        except PASSING as error:
            _report(error)
        if (taken := taken + 1) == turns:
            return ""
        time.sleep(turn_s)


def start_job(directory: Path, number: int, seconds: int) -> int:
    """Wait until no other job of the run has ranks, then print the layout, one override per line.

    Returns LEAVES if the run is over, if the job that trains gets further than this one, or if the wait takes
    too long. If then no job trains or waits, this one requests another before it leaves.
    """
    own, signalled, began = os.environ["SLURM_JOB_ID"], 0.0, time.monotonic()
    noted = False
    while time.monotonic() < began + LONGEST_WAIT_S:
        try:
            noted = noted or note(directory, number, "begun", step=checkpoint_step(directory)) or True
            plan = load(directory)
            now = view(directory, plan, own=own, holes=False)
            mine = next(job for job in now.jobs if job.id == own)
            before = [job for job in now.jobs if job.started and job.has_ranks and job.order < mine.order]
            training = [job.id for job in before if not job.is_ending]
            size = size_of(plan, mine.nodes)
            if is_over(directory, plan) or size.nodes != mine.nodes:
                break
            if not before:
                print("\n".join(size.overrides))
                return 0
            if not signalled and not takes_over(plan, now, mine):
                break
            if training and time.monotonic() - signalled > SIGNAL_S:
                slurm.run("scancel", "--signal=USR2", *training)
                signalled = time.monotonic()
        except PASSING as error:
            _report(error)
        time.sleep(POLL_S)
    _leave(directory, number, began - seconds, LEAVES)
    return LEAVES


def end_job(directory: Path, number: int, seconds: int, code: int) -> int:
    """Note the end of a job's ranks. Without a successor, stay for some turns and request one."""
    _leave(directory, number, time.monotonic() - seconds, code)
    return 0


def _leave(directory: Path, number: int, began: float, code: int) -> None:
    """Request a successor if the run needs a job, none trains or waits, and nobody cancelled this one."""
    own, turn_s = os.environ["SLURM_JOB_ID"], Plan.turn_s

    def is_needed() -> bool:
        now = view(directory, plan, own=own, ends=True, holes=False)
        return not is_followed(plan, now.jobs)

    for taken in range(LAST_TURNS):
        if taken:
            time.sleep(turn_s)
        try:
            _note_end(directory, number, began, code)
            plan = load(directory)
            turn_s = plan.turn_s
            if _is_cancelled(plan, own) or not (is_over(directory, plan) or is_needed()):
                break
            if over := turn(directory, own=own, ends=True):
                print(f"anywhen: no further job, because {over}", flush=True)
                break
            if not is_needed():
                break
        except PASSING as error:
            _report(error)
    note(directory, number, "left", seconds=time.monotonic() - began)


def _note_end(directory: Path, number: int, began: float, code: int) -> None:
    """Note that a job has no ranks any more."""
    step_s = 0.0
    if code != LEAVES:
        begun = next((job.begun for job in records(directory) if job.number == number), {})
        step_s = _step_seconds(directory, begun.get("time", math.inf))
    note(directory, number, "ended", code=code, seconds=time.monotonic() - began, step_s=step_s)
    _stop_if_failed(directory)


def _stop_if_failed(directory: Path) -> None:
    if has_failed(directory):
        _stop(directory, f"the ranks of {MAX_FAILURES} jobs failed without a newer checkpoint")


def _is_cancelled(plan: Plan, own: str) -> bool:
    """Return whether Slurm ends this job well before its time limit, as after scancel."""
    mine = [job for job in queue.jobs_of(plan)[0] if job.id == own and job.is_ending]
    return any(time.time() < job.started + job.seconds - plan.turn_s for job in mine)


def _step_seconds(directory: Path, since: float) -> float:
    """Return the median seconds of the steps since a Unix time; 0 if there are none."""
    path = directory.parent / "metrics.jsonl"
    found = read_records(path) if path.is_file() else []
    steps = [record for record in found if (record.get("time") or 0.0) > since]
    return median([float(record.get("timing_s/step") or 0.0) for record in steps] or [0.0])


def _report(error: Exception) -> None:
    print(f"anywhen: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def main(what: str, directory: str, *numbers: str) -> int:
    path, values = Path(directory), list(map(int, numbers))
    if what == "begin":
        return start_job(path, *values)
    if what == "end":
        return end_job(path, *values)
    follow(path, own=os.environ["SLURM_JOB_ID"])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
