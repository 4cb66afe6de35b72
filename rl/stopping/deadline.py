"""Deadlines of this process: `run.max_time` and the end of the job."""

import os
import time
from collections.abc import Mapping

STARTED = time.time()
"""Start of the process as Unix time: train_rl.py imports this module first."""


def job_end(environ: Mapping[str, str] | None = None) -> float | None:
    """Return the Unix time at which the scheduler will end this job, or None if it is unknown.

    slurm/job.sh and slurm/nodes.sh export LOCKSTEP_JOB_END; under srun alone Slurm 23.02 and newer sets
    SLURM_JOB_END_TIME.
    """
    found = os.environ if environ is None else environ
    end = found.get("LOCKSTEP_JOB_END") or found.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None
