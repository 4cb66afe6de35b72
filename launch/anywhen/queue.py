"""Reads Slurm's queue for the jobs of one run, and requests and cancels them."""

import math
import re
import time
from datetime import datetime

from launch import slurm
from launch.anywhen.decision import JobRequest, Plan, QueuedJob
from rl.config.durations import seconds_of
from rl.runtime.ranks import expand_hostlist

HELD = ("JobHeldAdmin", "launch")
"""Beginnings of the reasons for which a waiting job never starts by itself. The user may hold a job."""


def jobs_of(plan: Plan) -> list[QueuedJob]:
    """Return the run's jobs in the queue, those that end included. Raises SlurmError."""
    out = []
    for line in slurm.run("squeue", "--me", "-h", "-o", "%i|%T|%D|%l|%S|%r|%E|%j").splitlines():
        job, state, nodes, limit, start, reason, after, name = line.split("|", 7)
        if re.fullmatch(re.escape(plan.name) + r"-\d+", name):
            never = state in ("REQUEUE_HOLD", "SPECIAL_EXIT")
            waits = never or state in ("PENDING", "REQUEUED")
            held = never or (waits and reason.startswith(HELD))
            follows = waits and after not in ("", "(null)")
            started = 0.0 if waits else _unix(start)
            out.append(QueuedJob(job, int(nodes), _seconds(limit), started, held, follows))
    return out


def idle_nodes(plan: Plan) -> dict[str, list[float]]:
    """Return `idle` of the queue's view. Raises SlurmError."""
    taken: dict[str, float] = {}
    for line in slurm.run("squeue", "-h", "-t", "PD", "-o", "%S|%Y").splitlines():
        start, nodes = line.split("|")
        for node in expand_hostlist(nodes) if _unix(start) else []:
            taken[node] = min(_unix(start) - time.time(), taken.get(node, math.inf))
    idle: dict[str, list[float]] = {}
    for line in slurm.run("sinfo", "-N", "-h", "-t", "idle", "-o", "%P|%N").splitlines():
        name, node = line.split("|")
        is_default = name.endswith("*") and not plan.limits.partitions
        idle.setdefault("" if is_default else name.rstrip("*"), []).append(taken.get(node, math.inf))
    return idle


def accepts(plan: Plan, ask: JobRequest) -> bool:
    """Return whether Slurm would accept a job.

    Its expected start is not used: for Slurm 22.05 it is after all waiting jobs that need the same nodes.
    """
    try:
        slurm.run("sbatch", "--test-only", *_options(plan, ask, 0))
    except slurm.SlurmError:
        return False
    return True


def submit(plan: Plan, ask: JobRequest, number: int) -> str:
    """Request a job; return its id. Raises SlurmError if Slurm refuses it."""
    return slurm.run("sbatch", "--parsable", *_options(plan, ask, number)).strip().split(";")[0]


def _options(plan: Plan, ask: JobRequest, number: int) -> list[str]:
    """Return the options of sbatch, the batch file and its argument."""
    minutes = max(1, int(ask.seconds // 60))
    words = [f"--nodes={ask.nodes}", f"--time={minutes}", f"--job-name={plan.name}-{number}"]
    words += [f"--partition={ask.partition}"] if ask.partition else []
    words += [f"--dependency=afterany:{ask.after}"] if ask.after else []
    words += [f"--begin={plan.limits.not_before}"] if plan.not_before else []
    return [*words, plan.file, str(number)]


def _seconds(limit: str) -> float:
    try:
        return float(seconds_of(limit))
    except ValueError:  # UNLIMITED, or not known yet
        return math.inf


def _unix(time: str) -> float:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:  # N/A
        return 0.0
