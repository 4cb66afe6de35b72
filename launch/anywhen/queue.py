"""Reads Slurm's queue for the jobs of one run, and requests and cancels them."""

import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from launch import slurm
from launch.anywhen.decision import JobRequest, Plan, QueuedJob
from launch.anywhen.record import JobRecord, Submission
from rl.config.durations import seconds_of

HELD = ("JobHeldAdmin", "launch")
"""Beginnings of the reasons for which a waiting job never starts by itself. The user may hold a job."""


def jobs_of(submission: Submission, records: Sequence[JobRecord]) -> list[QueuedJob]:
    """Return the run's jobs in the queue, those that end included. Raises SlurmError."""
    known = {job.number: job for job in records}
    out = []
    for line in slurm.run("squeue", "--me", "-h", "-o", "%i|%T|%D|%l|%e|%r|%E|%j").splitlines():
        job, state, nodes, limit, end, reason, after, name = line.split("|", 7)
        if not (found := re.fullmatch(re.escape(submission.name) + r"-(\d+)", name)):
            continue
        record = known.get(int(found[1]))
        waits = state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
        starts = 0 if waits else int(record.begun.get("start", 1 << 30)) if record else 1 << 30
        held = waits and (reason.startswith(HELD) or state in ("REQUEUE_HOLD", "SPECIAL_EXIT"))
        out.append(
            QueuedJob(
                job,
                int(nodes),
                _seconds(limit),
                starts,
                _unix(end),
                held,
                waits and after not in ("", "(null)"),
            )
        )
    return out


def idle_nodes(plan: Plan) -> tuple[dict[str, int], dict[str, float]]:
    """Return the idle nodes, and the Unix time at which the first waiting job will start, by partition."""
    idle, starts = Counter[str](), dict[str, float]()
    for line in slurm.run("sinfo", "-h", "-t", "idle", "-o", "%P|%D").splitlines():
        name, number = line.split("|")
        for each in {name.rstrip("*"), "" if name.endswith("*") else name.rstrip("*")}:
            idle[each] += int(number)
    default = next(
        (name.rstrip("*") for name in slurm.run("sinfo", "-h", "-o", "%P").split() if name.endswith("*")), ""
    )
    for line in slurm.run("squeue", "-h", "-t", "PD", "-o", "%S|%P").splitlines():
        start, name = line.split("|")
        for each in {name, "" if name == default else name}:
            if at := _unix(start):
                starts[each] = min(at, starts.get(each, at))
    return dict(idle), starts


def options(submission: Submission, ask: JobRequest, number: int) -> list[str]:
    """Return the options of sbatch, the batch file and its argument."""
    minutes = max(1, int(ask.seconds // 60))
    words = [f"--nodes={ask.nodes}", f"--time={minutes}", f"--job-name={submission.name}-{number}"]
    words += [f"--partition={ask.partition}"] if ask.partition else []
    words += [f"--dependency=afterany:{ask.after}"] if ask.after else []
    if submission.plan.not_before:
        words.append(f"--begin={submission.plan.limits.not_before}")
    return [*words, submission.file, str(number)]


def starts_at(submission: Submission, ask: JobRequest) -> float:
    """Return the Unix time at which Slurm would start a job; infinity if it would refuse the job."""
    try:
        said = slurm.run("sbatch", "--test-only", *options(submission, ask, 0), errors=True)
    except slurm.SlurmError:
        return float("inf")
    found = re.search(r"to start at (\S+)", said)
    return _unix(found[1]) if found else float("inf")


def submit(submission: Submission, ask: JobRequest, number: int) -> str:
    """Request a job; return its id. Raises SlurmError if Slurm refuses it."""
    return slurm.run("sbatch", "--parsable", *options(submission, ask, number)).strip().split(";")[0]


def _seconds(limit: str) -> float:
    try:
        return float(seconds_of(limit))
    except ValueError:  # UNLIMITED, or not known yet
        return float("inf")


def _unix(time: str) -> float:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:  # N/A
        return 0.0
