"""`<run.dir>/status.json`: what has become of a run, for people, batch scripts and launch tools. Written by rank 0.

    {"state": "running", "step": 12, "checkpoint_step": 10, "max_steps": 100, "reason": "", "job": "4711_2", "restarts": 0,
     "host": "node1", "pid": 4242, "time": 1763770000.0}

state: running, stopped (to be continued), finished, failed. A run that was killed says running; its `time` tells.
The same is written to the file that LOCKSTEP_STATUS names, where slurm/job.sh reads `checkpoint_step`.
"""

import json
import os
import platform
import time
from pathlib import Path

FILE_NAME = "status.json"


def note_failure(run_dir: str, error: Exception) -> None:
    """Write state failed, and why, over what the status says of this process's run. For rank 0."""
    path = Path(run_dir, FILE_NAME)
    facts = json.loads(path.read_text()) if path.exists() else {}
    if facts.get("pid") == os.getpid():  # else it failed before it had a status of its own
        facts |= {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
        _write(path, facts)


def _write(path: Path, facts: dict) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(facts | {"time": round(time.time(), 3)}) + "\n")
    partial.replace(path)  # a reader sees the old or the new one


class Status:
    """The status of one run; a change is on disk when the call returns. For rank 0 only, silent on others."""

    def __init__(self, run_dir: str, *, max_steps: int, leads: bool):
        also = os.environ.get("LOCKSTEP_STATUS")
        self._paths = [Path(run_dir, FILE_NAME), *([Path(also)] if also else [])] if leads else []
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        self._facts = {
            "state": "running",
            "step": 0,
            "checkpoint_step": 0,
            "max_steps": max_steps,
            "reason": "",
            "job": f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", ""),
            "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            "host": platform.node(),
            "pid": os.getpid(),
        }

    def write(self, **changes: str | int) -> None:
        """Change some of the facts, and write all."""
        assert changes.keys() <= self._facts.keys(), changes
        self._facts |= changes
        for path in self._paths:
            _write(path, self._facts)
