"""Takes the turns of a run: inside each of its jobs, and on the login node with `submit --anywhen --stay`.

    python -m launch.anywhen.turns begin DIR NUMBER S     in a new job: wait for the trainer; print the layout
    python -m launch.anywhen.turns follow DIR NUMBER S    beside the ranks: a turn per minute; at SIGTERM: end
    python -m launch.anywhen.turns end DIR NUMBER S CODE  after the ranks: note the end, request a successor

DIR is `<run.dir>/anywhen`, S the seconds since the job's start. Nothing is requested while Slurm does not
answer, or answers what cannot be, because a request without a view of the queue could double a job.
"""

import functools
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from launch import slurm
from launch.anywhen import decision, queue, record
from launch.anywhen.decision import JobRequest, Plan, QueuedJob, QueueView
from launch.anywhen.record import LEAVES, JobRecord, note, records
from launch.runs import DIRECTORY as LOGS
from launch.runs import note_job

T = TypeVar("T")

LONGEST_WAIT_S = 1800.0
"""Maximum wait of a new job for the end of the job that trains."""
POLL_S = 5.0
"""Seconds between two looks at the queue while a new job waits."""
LONGEST_DOUBT_S = 3600.0
"""Seconds for which Slurm is asked who cancelled a job. Nothing is requested until it tells."""
SIGNAL_S = 20.0
"""Seconds between two signals to a job that is to stop."""
LAST_TURNS, SILENT_TURNS = 6, 60
"""Number of turns for which an ended job without a successor stays to request one, if Slurm answers, and if
it does not. The pause before such a request is at most four turns."""
FOLLOWED = 4
"""Exit code of a follower that has not noted the end of the ranks; the batch file then does."""
PASSING = (ValueError, OSError, KeyError)
"""Errors of Slurm, of its output and of the disk, after which the next turn tries again."""


def turn(directory: Path, own: str = "") -> str:
    """Look at the queue once, and request a job if one is needed; return why the run is over, or ''.

    own: id of the job in which this runs. Raises SlurmError if Slurm does not answer, and ValueError if it
    prints something else.
    """
    plan, number = record.load(directory), max((job.number for job in records(directory)), default=0) + 1
    found = view(directory, plan, own)
    spent = f"run.limits.node_hours={plan.limits.node_hours:g} allows none"
    if over := record.is_over(directory, plan) or (spent if decision.is_spent(found) else ""):
        _cancel(directory, [job for job in found.jobs if not job.started])
        return over
    cancel, ask = decision.decide(found)
    if ask is not None and not note(directory, number, "asked", **asdict(ask)):
        return ""  # another process of the run makes this request
    _cancel(directory, cancel)
    if ask is None:
        return ""
    if cancel and {job.id for job in queue.jobs_of(plan)[0]} & {job.id for job in cancel}:
        raise slurm.SlurmError("a job that was to make room has started; nothing is requested.")
    with slurm.undisturbed():
        job = queue.submit(plan, ask, number)
        _note_submitted(directory, number, job)
        print(f"anywhen: job {job} asks for {ask.nodes} nodes for {ask.seconds / 3600:.2f} h", flush=True)
    return ""


def view(directory: Path, plan: Plan, own: str = "") -> QueueView:
    """Return the queue and the progress of the run, as `turn` sees them.

    If its ranks have ended, the own job is left out. If the user cancelled a job of the run, or too many
    failed, the file `stop` is written.
    """
    queued, cancelled = queue.jobs_of(plan)
    jobs, now = records(directory), time.time()  # after the queue, because they explain what it has
    _note_seen(directory, jobs, queued)
    if own and own not in {job.id for job in queued}:
        raise slurm.SlurmError(f"squeue does not list job {own}, which runs; nothing is requested.")
    _note_cancelled(directory, jobs, cancelled, now)
    _cancel(directory, unlaunched := [job for job in queued if job.held.startswith(queue.NO_LAUNCH)])
    partitions = {job.number: job.asked.get("partition", "") for job in jobs}
    ended = {job.number for job in jobs if job.ended}
    ends = any(job.id == own and job.number in ended for job in queued)
    queued = [job for job in queued if job not in unlaunched and not (ends and job.id == own)]
    ending = [job for job in queued if job.is_ending or job.number in ended]
    gone = {job for job in ending if not queue.has_steps(job.id, is_ending=job.is_ending)}
    queued = [
        replace(
            job, has_ranks=job not in gone, is_ending=job in ending, partition=partitions.get(job.number, "")
        )
        for job in queued
    ]
    if not any(job.is_training for job in queued) and record.has_failed(directory):
        record.stop(directory, f"{record.MAX_FAILURES} jobs failed without a newer checkpoint")
    here, well = {job.number for job in queued}, {job.number for job in queued if not job.held}
    refused = next((n for n, job in enumerate(reversed(jobs)) if job.begun or job.number in well), len(jobs))
    return QueueView(
        plan,
        now,
        queued,
        lambda: _told(queue.idle_nodes, plan),
        lambda ask: _accepts(plan, ask),
        max(1, plan.max_steps - record.checkpoint_step(directory)),  # a run that is not over needs a job
        sum(job.spent_node_s for job in jobs if job.number not in here),
        abs(now - jobs[-1].asked["time"]) if jobs else math.inf,  # a clock may have been ahead
        min(refused, 1) if ends else refused,
        functools.cache(lambda: _told(queue.longest_s, plan)),
    )


def _note_seen(directory: Path, jobs: Sequence[JobRecord], queued: Sequence[QueuedJob]) -> None:
    """Note jobs in the queue that sbatch did not report, and jobs that have started."""
    requests = {job.number: job for job in jobs}
    for job in queued:
        request = requests.get(job.number)
        if request and not request.job:
            _note_submitted(directory, job.number, job.id)
        if request and job.started and not request.begun and not request.started:
            note(directory, job.number, "started")


def _note_submitted(directory: Path, number: int, job: str) -> None:
    if note(directory, number, "submitted", job=job):
        note_job(directory.parent / LOGS, job)


def _note_cancelled(
    directory: Path, jobs: Sequence[JobRecord], cancelled: Sequence[tuple[str, int]], now: float
) -> None:
    """Note jobs that the user or an administrator cancelled. If it was the user, write the file `stop`."""
    for job in jobs:
        names = [name for name, number in cancelled if number == job.number and job.job in (name, "")]
        for name in [*names, *job.doubted.get("job", "").split()][:1]:
            is_own = job.dropped and job.begun.get("time", 0.0) <= job.dropped["time"]
            if not job.cancelled and not is_own:
                job.doubted or note(directory, job.number, "doubted", job=name)
                is_users = _is_cancelled_by_user(name, abs(now - job.doubted.get("time", now)))
                if note(directory, job.number, "cancelled", by_user=is_users) and is_users:
                    record.stop(directory, f"job {name} was cancelled")


def _told(ask: Callable[[Plan], dict[str, T]], plan: Plan) -> dict[str, T]:
    """Return what Slurm tells; nothing if it fails, because a successor needs neither holes nor limits."""
    try:
        return ask(plan)
    except PASSING as error:
        _report(error)
        return {}


def _accepts(plan: Plan, ask: JobRequest) -> bool | None:
    """Return whether Slurm would accept a job; None if it does not answer."""
    try:
        return queue.accepts(plan, ask)
    except slurm.NoAnswer as error:
        _report(error)
        return None


def _is_cancelled_by_user(job: str, asked_s: float) -> bool:
    """Return whether the user cancelled a job; True if Slurm has not told for LONGEST_DOUBT_S."""
    try:
        return queue.is_cancelled_by_user(job)
    except slurm.SlurmError:
        if asked_s < LONGEST_DOUBT_S:
            raise
        return True


def _cancel(directory: Path, jobs: Sequence[QueuedJob]) -> None:
    """Cancel waiting jobs, which nobody then takes for cancelled by the user."""
    for job in jobs:
        note(directory, job.number, "dropped", held=job.held, step=record.checkpoint_step(directory))
    if jobs:
        slurm.run("scancel", "--state=PENDING", *(job.id for job in jobs))


def follow(
    directory: Path, turns: float = math.inf, own: str = "", is_done: Callable[[], bool] = lambda: False
) -> str:
    """Take a turn per minute until the run is over; return why, or '' after so many turns, or if is_done."""
    turn_s = Plan.turn_s
    while True:
        try:
            turn_s = record.load(directory).turn_s
            if is_done():
                return ""
            if over := turn(directory, own):
                return over
            if is_done():
                return ""
        except PASSING as error:
            _report(error)
        if (turns := turns - 1) <= 0:
            return ""
        time.sleep(turn_s)


def start_job(directory: Path, number: int, seconds: int) -> int:
    """Wait until no other job of the run has ranks, then print the layout, one override per line.

    Returns LEAVES if the run is over, if the job that trains gets further than this one, or if the wait takes
    too long. If then no job trains or waits, this one requests another before it leaves.
    """
    own, signalled, began = os.environ["SLURM_JOB_ID"], 0.0, time.monotonic()
    noted, told = False, ""
    while time.monotonic() < began + LONGEST_WAIT_S:
        try:
            noted = noted or note(directory, number, "begun", step=record.checkpoint_step(directory)) or True
            plan = record.load(directory)
            now = view(directory, plan, own)
            if (mine := next((job for job in now.jobs if job.id == own), None)) is None:
                break  # requeued after its end was noted: `view` leaves it out
            before = [job for job in now.jobs if job.started and job.has_ranks and job.order < mine.order]
            training = [job.id for job in before if not job.is_ending]
            size = plan.size_of(mine.nodes)
            if record.is_over(directory, plan) or size.nodes != mine.nodes:
                break
            if not before:
                print("\n".join(size.overrides))
                return 0
            begun = {job.number for job in records(directory) if job.begun}
            takes_over = signalled or decision.takes_over(now, mine)
            if not takes_over and begun & {job.number for job in before}:  # else its launch may fail
                break
            waits = ", ".join(job.id + " (ends)" * job.is_ending for job in before)
            if waits != told:
                _report(f"waits for the ranks of job {waits}")
                told = waits
            if training and takes_over and time.monotonic() - signalled > SIGNAL_S:
                slurm.run("scancel", "--signal=USR2", *training)
                signalled = time.monotonic()
        except PASSING as error:
            _report(error)
        time.sleep(POLL_S)
    end_job(directory, number, int(time.monotonic() - began) + seconds, LEAVES)
    return LEAVES


def end_job(directory: Path, number: int, seconds: int, code: int) -> int:
    """Note the end of a job's ranks. Without a successor, stay for some turns and request one.

    None is requested if the user cancelled this job.
    """
    own, began, looks = os.environ["SLURM_JOB_ID"], time.monotonic() - seconds, itertools.count(1)

    def is_done() -> bool:
        plan = record.load(directory)
        step_s = 0.0 if code == LEAVES else record.step_seconds(directory, number)
        note(directory, number, "ended", code=code, seconds=time.monotonic() - began, step_s=step_s)
        found = view(directory, plan, own)
        is_followed = any(map(found.will_train, found.jobs)) and not record.is_over(directory, plan)
        if is_followed or next(looks) > 2 * LAST_TURNS:
            return True
        return queue.is_cancelled(own) and queue.is_cancelled_by_user(own)

    if over := follow(directory, SILENT_TURNS, own, is_done):
        print(f"anywhen: no further job, because {over}", flush=True)
    note(directory, number, "left", seconds=time.monotonic() - began)
    return 0


def _report(message: object) -> None:
    print(f"anywhen: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def main(what: str, directory: str, *words: str) -> int:
    path, began, (number, seconds, *code) = Path(directory), time.monotonic(), map(int, words)
    if what == "begin":
        return start_job(path, number, seconds)
    if what == "end":
        return end_job(path, number, seconds, *code)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        follow(path, own=os.environ["SLURM_JOB_ID"])
    except SystemExit:  # Slurm ends the job, and kills this process soon
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return end_job(path, number, seconds + int(time.monotonic() - began), 0)
    return FOLLOWED


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
