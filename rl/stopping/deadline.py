"""Deadlines of this process: `run.max_time` and the end of the job."""

import os
import time
from collections.abc import Mapping

STARTED = time.time()
"""Start of the process as Unix time: train_rl.py imports this module first."""


def job_end(environ: Mapping[str, str] | None = None) -> float | None:
    """Return the Unix time at which the scheduler will end this job, or None if it is unknown.

    slurm/job.sh exports SLURM_JOB_END_TIME where Slurm (before 23.02) does not, slurm/nodes.sh
    LOCKSTEP_JOB_END under other schedulers.
    """
    found = os.environ if environ is None else environ
    end = found.get("LOCKSTEP_JOB_END") or found.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None
