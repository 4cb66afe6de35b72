"""Takes the turns of a run: inside each of its jobs, and on the login node with `submit --anywhen --stay`.

    python -m launch.anywhen.turns begin DIR NUMBER      in a new job: wait for the trainer; print the layout
    python -m launch.anywhen.turns follow DIR            beside the ranks: a turn per minute
    python -m launch.anywhen.turns end DIR NUMBER CODE   after the ranks: note the end, request a successor

DIR is `<run.dir>/anywhen`. Nothing is requested while Slurm does not answer, because a request without a view
of the queue could double a job.
"""

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

from launch import slurm
from launch.anywhen import queue
from launch.anywhen.decision import Decision, Plan, QueueView, decide, size_of, takes_over
from launch.anywhen.record import LEAVES, checkpoint_step, is_over, load, note, records
from launch.runs import DIRECTORY as LOGS
from launch.runs import note_job
from rl.run_directory.metric_log import read_records

LONGEST_WAIT_S = 1800.0
"""Maximum wait of a new job for the end of the job that trains."""
SIGNAL_S = 20.0
"""Seconds between two signals to a job that is to stop."""
LAST_TURNS = 5
"""Number of turns for which an ended job that has no successor stays to request one."""


def turn(directory: Path, *, but: str = "") -> str:
    """Look at the queue once, and request a job if one is needed; return why the run is over, or ''.

    but: id of a job that is about to end and counts as ended. Raises SlurmError if Slurm does not answer.
    """
    if over := is_over(directory):
        return over
    plan, number = load(directory), len(records(directory)) + 1
    _act(directory, plan, decide(plan, view(directory, plan, but=but)), number)
    return ""


def view(directory: Path, plan: Plan, *, but: str = "") -> QueueView:
    """Return the queue and the progress of the run. Raises SlurmError if Slurm does not answer."""
    jobs, now = records(directory), time.time()
    queued = [job for job in queue.jobs_of(plan) if job.id != but]
    here, well = {job.id for job in queued}, {job.id for job in queued if not job.is_held}
    refused = next((n for n, job in enumerate(reversed(jobs)) if job.begun or job.job in well), len(jobs))
    return QueueView(
        now,
        queued,
        queue.idle_nodes(plan),
        lambda ask: queue.accepts(plan, ask),
        plan.max_steps - checkpoint_step(directory),
        sum(job.spent_node_s for job in jobs if job.job not in here),
        now - jobs[-1].asked["time"] if jobs else float("inf"),
        refused,
    )


def _act(directory: Path, plan: Plan, decision: Decision, number: int) -> None:
    """Cancel jobs and request one, unless another process of the run makes this request."""
    cancel, ask = decision
    if ask is not None and not note(directory, number, "asked", **asdict(ask)):
        return
    if cancel:
        slurm.run("scancel", "--state=PENDING", *cancel)
    if ask is not None:
        job = queue.submit(plan, ask, number)
        note(directory, number, "job", job=job)
        note_job(directory.parent / LOGS, job)
        print(f"anywhen: job {job} asks for {ask.nodes} nodes for {ask.seconds / 3600:.2f} h", flush=True)


def follow(directory: Path, turns: int | None = None) -> str:
    """Take a turn per minute until the run is over, or so many turns; return why it is over, or ''."""
    taken = 0
    while True:
        try:
            if over := turn(directory):
                return over
        except (slurm.SlurmError, OSError) as error:
            _report(error)
        if (taken := taken + 1) == turns:
            return ""
        time.sleep(load(directory).turn_s)


def start_job(directory: Path, number: int) -> int:
    """Wait until no other job of the run has ranks, then print the layout, one override per line.

    Returns LEAVES if the run is over, or if the job that trains gets further than this one.
    """
    own, signalled = os.environ["SLURM_JOB_ID"], 0.0
    note(directory, number, "begun", step=checkpoint_step(directory))
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not is_over(directory) and time.monotonic() < deadline:
        try:
            plan = load(directory)
            now = view(directory, plan)
            mine = next(job for job in now.jobs if job.id == own)
            earlier = [job.id for job in now.jobs if job.started and job.order < mine.order]
            if not earlier:
                print("\n".join(size_of(plan, mine.nodes).overrides))
                return 0
            if not signalled and not takes_over(plan, now, mine):
                break
            if time.monotonic() - signalled > SIGNAL_S:
                slurm.run("scancel", "--signal=USR2", *earlier)
                signalled = time.monotonic()
        except (slurm.SlurmError, OSError, StopIteration) as error:
            _report(error)
        time.sleep(2)
    note(directory, number, "ended", code=LEAVES)
    return LEAVES


def end_job(directory: Path, number: int, code: int) -> int:
    """Note the end of a job's ranks. Without a successor, stay for some turns and request one."""
    begun = next(job.begun for job in records(directory) if job.number == number)
    note(directory, number, "ended", code=code, step_s=_step_seconds(directory, begun["time"]))
    own, plan = os.environ["SLURM_JOB_ID"], load(directory)
    for _ in range(LAST_TURNS):
        try:
            others = [job for job in queue.jobs_of(plan) if job.id != own]
            if over := is_over(directory):
                if waiting := [job.id for job in others if not job.started]:
                    slurm.run("scancel", *waiting)
                print(f"anywhen: no further job, because {over}", flush=True)
                return 0
            if any(not job.is_held for job in others):
                return 0
            turn(directory, but=own)
        except (slurm.SlurmError, OSError) as error:
            _report(error)
        time.sleep(plan.turn_s)
    return 0


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
    follow(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
