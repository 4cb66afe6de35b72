"""Until when this process may run: `run.max_time` and the end of the Slurm job."""

import os
import time
from collections.abc import Mapping

STARTED = time.time()
"""When this module was imported, which train_rl.py does first: Unix time."""


def job_end(environ: Mapping[str, str] | None = None) -> float | None:
    """When Slurm will end this job, Unix time; None if it has no end or nobody says when. slurm/job.sh exports it where Slurm
    (before 23.02) does not."""
    end = (os.environ if environ is None else environ).get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None
