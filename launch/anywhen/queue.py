"""Reads Slurm's queue for the jobs of one run, and requests jobs.

The functions raise SlurmError, or ValueError for output that is not Slurm's.
"""

import math
import os
import re
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

from launch import slurm
from launch.anywhen.decision import JobRequest, Plan, QueuedJob
from rl.config.durations import seconds_of
from rl.runtime.ranks import expand_hostlist

RUNS = ("RUNNING", "COMPLETING")
WAITS = ("PENDING", "REQUEUED")
HOLDS = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States of jobs that squeue lists for some minutes after their end."""
NO_LAUNCH = "launch"
"""Beginning of the reason for which Slurm holds a job whose prolog failed."""
HELD = re.compile(rf"JobHeldAdmin|JobHoldMaxRequeue|{NO_LAUNCH}|Partition(Node|Time)Limit")
"""Beginning of a reason for which a waiting job never starts by itself. The user may hold a job."""
LOG_END = 1 << 20
"""Bytes at the end of a job's log in which Slurm's line about a cancellation is searched."""
LOG = Path("/proc/self/fd/2")
"""The log of the job in which this runs, also if sbatch was given another --output or --error."""


def jobs_of(plan: Plan) -> tuple[list[QueuedJob], list[tuple[str, int]]]:
    """Return the run's jobs in the queue, those that end included, and ids and numbers of cancelled ones."""
    own, queued, cancelled = plan.name.rpartition("-")[2], [], []
    columns = "%i %T %D %l %S %r %E %j"
    for row in slurm.table(columns, "squeue", "--me", "--noconvert", "-h", "-t", "all"):
        job, state, nodes, limit, start, reason, after, name = row
        number = re.fullmatch(rf".*-{own}-(\d+)", name)  # run.name may have changed
        if number is None:
            continue
        if state in ENDED:
            cancelled += [(job, int(number[1]))] if state == "CANCELLED" else []
            continue
        holds = state in HOLDS or (state not in (*RUNS, *WAITS) and start == "N/A")  # in a newer Slurm
        waits = holds or state in WAITS
        queued.append(
            QueuedJob(
                job,
                int(number[1]),
                int(nodes),
                _seconds(limit),
                started=0.0 if waits else _unix(start),
                held=(reason or state) if holds or (waits and HELD.match(reason)) else "",
                is_successor=waits and after not in ("", "(null)"),
                is_ending=state == "COMPLETING",
            )
        )
    return queued, cancelled


def is_cancelled_by_user(job: str) -> bool:
    """Return whether this user cancelled a job; True if Slurm has no accounting, which knows it.

    Raises SlurmError while its accounting does not answer, or does not know it yet.
    """
    try:
        found = slurm.run("sacct", "-X", "-n", "-P", "-j", job, "-o", "State")
    except slurm.SlurmError as error:
        if re.search("storage is disabled|is not on this machine", str(error)):
            return True
        raise
    if not (by := re.search(r"CANCELLED by (\d+)", found)):
        raise slurm.SlurmError(f"sacct does not tell yet who cancelled job {job}; nothing is requested.")
    return int(by[1]) == os.getuid()


def is_cancelled(own: str) -> bool:
    """Return whether Slurm ends the own job because of scancel, according to its line in the job's log.

    If it pre-empts the job, for example, the line ends with DUE TO PREEMPTION.
    """
    if not LOG.is_file():
        return False
    with LOG.open("rb") as file:
        file.seek(-min(LOG_END, LOG.stat().st_size), os.SEEK_END)
        return bool(re.search(rb"JOB %s ON \S+ CANCELLED AT \S+ \*" % own.encode(), file.read()))


def has_steps(job: str, is_ending: bool) -> bool:
    """Return whether Slurm lists a step of a job that may have ranks; the run's lock asks the same.

    is_ending: whether Slurm ends the job. If not, its batch script only requests a successor.
    """
    steps = slurm.run("squeue", "-h", "-s", "-j", job, "-o", "%i").split()
    others = (".extern",) if is_ending else (".extern", ".batch")
    return not all(step.endswith(others) for step in steps)


def idle_nodes(plan: Plan) -> dict[str, list[float]]:
    """Return `idle` of the queue's view."""
    taken, idle = defaultdict[str, float](lambda: math.inf), defaultdict[str, list[float]](list)
    for start, nodes in slurm.table("%S %Y", "squeue", "-h", "-t", "PD"):
        for node in expand_hostlist(nodes) if start != "N/A" else []:
            taken[node] = min(_unix(start) - time.time(), taken[node])
    for name, node in slurm.table("%P %N", "sinfo", "-N", "-h", "-t", "idle"):
        idle[_partition(plan, name)].append(taken[node])
    return idle


def longest_s(plan: Plan) -> dict[str, float]:
    """Return partition -> its maximum time limit in seconds."""
    return {_partition(plan, p): _seconds(limit) for p, limit in slurm.table("%P %l", "sinfo", "-h")}


def _partition(plan: Plan, name: str) -> str:
    """Return the plan's name of a partition; sinfo marks the default one with *."""
    return "" if name.endswith("*") and plan.partitions == [""] else name.rstrip("*")


def accepts(plan: Plan, ask: JobRequest) -> bool:
    """Return whether Slurm would accept a job.

    Its expected start is not used: for Slurm 22.05 it is after all waiting jobs that need the same nodes.
    By default Slurm also accepts a job that is longer than its partition allows (`longest_s`).
    """
    try:
        slurm.run("sbatch", "--test-only", *_options(plan, ask, 0))
    except slurm.NoAnswer:
        raise
    except slurm.SlurmError:
        return False
    return True


def submit(plan: Plan, ask: JobRequest, number: int) -> str:
    """Request a job; return its id."""
    return slurm.submit(*_options(plan, ask, number))


def _options(plan: Plan, ask: JobRequest, number: int) -> list[str]:
    """Return the options of sbatch, the batch file and its argument."""
    minutes = max(1, int(ask.seconds // 60))
    words = [f"--nodes={ask.nodes}", f"--time={minutes}", f"--job-name={plan.name}-{number}", "--requeue"]
    words += [f"--partition={ask.partition}"] if ask.partition else []
    words += [f"--dependency=afterany:{ask.after}"] if ask.after else []
    words += [f"--begin={datetime.fromtimestamp(plan.not_before):%Y-%m-%dT%H:%M:%S}"] * bool(plan.not_before)
    return [*words, plan.file, str(number)]


def _seconds(limit: str) -> float:
    try:
        return float(seconds_of(limit))
    except ValueError:  # UNLIMITED, or not known yet
        return math.inf


def _unix(time: str) -> float:
    return datetime.fromisoformat(time).replace(tzinfo=UTC).timestamp()
