"""Takes the turns of a run: inside each of its jobs, and on the login node with `submit --anywhen --stay`.

    python -m launch.anywhen begin DIR NUMBER      in a new job: wait for the trainer to end; print the layout
    python -m launch.anywhen follow DIR            beside the ranks: a turn per minute
    python -m launch.anywhen end DIR NUMBER CODE   after the ranks: note the end; make sure of a successor

DIR is `<run.dir>/anywhen`. Nothing is requested while Slurm does not answer, because a request without a view
of the queue could double a job.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from launch import slurm
from launch.anywhen import queue
from launch.anywhen.decision import Decision, QueuedJob, QueueView, decide, takes_over
from launch.anywhen.record import Submission, begin, is_over, load, note, records
from rl.run_directory.metric_log import read_records
from rl.run_directory.status import FILE_NAME as STATUS
from rl.run_directory.status import read_object

LEAVES = 3
"""Exit code of `begin` if this job is not needed."""
SIGNAL_S = 20.0
"""Seconds between two signals to a job that is to stop."""
LAST_TURNS = 5
"""Number of turns for which an ended job that has no successor stays to request one."""


def main(argv: list[str]) -> int:
    what, directory = argv[0], Path(argv[1])
    if what == "begin":
        return start_job(directory, int(argv[2]))
    if what == "follow":
        follow(directory)
        return 0
    return end_job(directory, int(argv[2]), int(argv[3]))


def turn(directory: Path, *, but: str = "") -> str:
    """Look at the queue once, and request a job if one is needed; return why the run is over, or ''.

    but: id of a job that is about to end and counts as ended. Raises SlurmError if Slurm does not answer.
    """
    if over := is_over(directory):
        return over
    submission, number = load(directory), len(records(directory)) + 1
    decision = decide(submission.plan, view(directory, submission, but=but))
    if decision != Decision():
        _act(directory, submission, decision, number)
    return ""


def view(directory: Path, submission: Submission, *, but: str = "") -> QueueView:
    """Return the queue and the progress of the run. Raises SlurmError if Slurm does not answer."""
    jobs, now = records(directory), time.time()
    queued = queue.jobs_of(submission, jobs)
    here = {job.id for job in queued} - {but}
    idle, starts = queue.idle_nodes(submission.plan)
    status = read_object(directory.parent / STATUS)
    silent_s = now - jobs[-1].asked["time"] if jobs else float("inf")
    well = {job.id for job in queued if not job.is_held}
    refused = next((n for n, job in enumerate(reversed(jobs)) if job.begun or job.job in well), len(jobs))
    turn_s = submission.plan.turn_s
    return QueueView(
        now,
        [job for job in queued if job.id != but],
        idle,
        {name: at - now for name, at in starts.items()},
        lambda ask: queue.starts_at(submission, ask) <= time.time() + turn_s,
        submission.max_steps - int(status.get("checkpoint_step") or 0),
        sum(job.spent_node_s for job in jobs if job.job not in here),
        silent_s,
        refused,
    )


def _act(directory: Path, submission: Submission, decision: Decision, number: int) -> None:
    """Cancel jobs and request one, unless another process of the run makes this request."""
    ask = decision.ask
    if ask is None:
        slurm.run("scancel", "--state=PENDING", *decision.cancel)
        return
    facts = {"nodes": ask.nodes, "seconds": ask.seconds, "partition": ask.partition, "after": ask.after}
    if not note(directory, number, "asked", **facts):
        return
    if decision.cancel:
        slurm.run("scancel", "--state=PENDING", *decision.cancel)
    job = queue.submit(submission, ask, number)
    note(directory, number, "job", job=job)
    print(f"anywhen: job {job} asks for {ask.nodes} nodes for {ask.seconds / 3600:.2f} h", flush=True)


def follow(directory: Path, turns: int | None = None) -> str:
    """Take a turn per minute until the run is over, or so many turns; return why it is over, or ''."""
    taken = 0
    while True:
        try:
            if over := turn(directory):
                return over
        except (slurm.SlurmError, OSError) as error:
            print(f"anywhen: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        if (taken := taken + 1) == turns:
            return ""
        time.sleep(load(directory).plan.turn_s)


def start_job(directory: Path, number: int) -> int:
    """Wait until no other job of the run has ranks, then print the layout, one override per line.

    Returns LEAVES if the run is over, or if the job that trains gets further than this one.
    """
    own, start, signalled = os.environ["SLURM_JOB_ID"], begin(directory, number), 0.0
    deadline = time.monotonic() + 1800
    while not is_over(directory) and time.monotonic() < deadline:
        try:
            submission = load(directory)
            now = view(directory, submission)
            mine = next(job for job in now.jobs if job.id == own)
            mine = replace(mine, starts=start)
            others = [job for job in now.jobs if job.is_running and job.id != own]
            if any(job.starts < start for job in others):
                if not signalled and not takes_over(submission.plan, now, mine):
                    break
                if time.monotonic() - signalled > SIGNAL_S:
                    _stop(directory, others, start)
                    signalled = time.monotonic()
            else:
                size = next(size for size in submission.plan.sizes if size.nodes == mine.nodes)
                print("\n".join(size.overrides))
                return 0
        except (slurm.SlurmError, OSError, StopIteration) as error:
            print(f"anywhen: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        time.sleep(2)
    note(directory, number, "ended", code=0, evicted=True)
    return LEAVES


def _stop(directory: Path, others: list[QueuedJob], start: int) -> None:
    """Signal the ranks of the jobs that started earlier to save and end."""
    for job in others:
        if job.starts < start:
            note(directory, job.starts, "evicted")
            slurm.run("scancel", "--signal=USR2", job.id)


def end_job(directory: Path, number: int, code: int) -> int:
    """Note the end of a job's ranks. Without a successor, stay for some turns and request one."""
    begun = next(job.begun for job in records(directory) if job.number == number)
    evicted = (directory / f"{begun['start']:06d}-evicted.json").exists()
    note(directory, number, "ended", code=code, evicted=evicted, step_s=_step_seconds(directory, begun))
    own, over = os.environ["SLURM_JOB_ID"], is_over(directory)
    for _ in range(LAST_TURNS):
        submission = load(directory)
        try:
            others = [job for job in queue.jobs_of(submission, records(directory)) if job.id != own]
            if over:
                if waiting := [job.id for job in others if not job.is_running]:
                    slurm.run("scancel", *waiting)
                print(f"anywhen: no further job, because {over}", flush=True)
                return 0
            if any(not job.is_held for job in others):
                return 0
            over = turn(directory, but=own)
        except (slurm.SlurmError, OSError) as error:
            print(f"anywhen: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        time.sleep(submission.plan.turn_s)
    return 0


def _step_seconds(directory: Path, begun: dict) -> float:
    """Return the median seconds of the steps of a job's start; 0 if it took none."""
    path = directory.parent / "metrics.jsonl"
    found = read_records(path) if path.is_file() else []
    steps = [record for record in found if (record.get("time") or 0.0) > begun["time"]]
    return median([float(record.get("timing_s/step") or 0.0) for record in steps] or [0.0])
