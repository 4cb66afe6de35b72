"""Deadlines of this process: `run.max_time` and the end of the Slurm job."""

import os
import time
from collections.abc import Mapping

STARTED = time.time()
"""Start of the process as Unix time: train_rl.py imports this module first."""


def job_end(environ: Mapping[str, str] | None = None) -> float | None:
    """Return the Unix time at which Slurm will end this job, or None if it is unknown.

    slurm/job.sh exports SLURM_JOB_END_TIME where Slurm (before 23.02) does not.
    """
    end = (os.environ if environ is None else environ).get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None
