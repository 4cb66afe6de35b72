"""`<run.dir>/status.json`: what has become of a run, for people, batch scripts and launch tools.

    {"state": "running", "step": 12, "checkpoint_step": 10, "max_steps": 100, "reason": "", "job": "4711_2",
     "restarts": 0, "host": "node1", "pid": 4242, "start": "9f2c...", "time": 1763770000.0}

state: running, stopped (to be continued), finished, failed. Rank 0 writes how far the run is. The rank that
ends the run writes the end and its cause; the first cause stays. A run whose ranks were all killed at once
still says running; its `time` shows for how long it has been silent. `start` is different for each start of a
run. The same is written to the file that LOCKSTEP_STATUS names, where slurm/job.sh reads `checkpoint_step`.
"""

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

FILE_NAME = "status.json"

PATIENCE_S = 5.0
"""Longest wait of a rank that fails for a write of its other thread, in seconds: a file system may hang."""


class Status:
    """The status of one start of a run; a change is on disk when the call returns. Thread-safe.

    Args:
        leads: whether this is rank 0. Only rank 0 writes progress; every rank may write the end.
        start: token of the run directory's lock, identical on all ranks.
        is_taken_over: whether another run holds the directory's lock; this one then writes no end into it.
    """

    def __init__(
        self,
        run_dir: str,
        *,
        max_steps: int,
        leads: bool,
        start: str = "",
        is_taken_over: Callable[[], bool] = lambda: False,
    ):
        also = os.environ.get("LOCKSTEP_STATUS")
        self._leads, self._start, self._is_taken_over = leads, start, is_taken_over
        self._path = Path(run_dir, FILE_NAME)
        self._paths = [self._path, *([Path(also)] if also else [])]
        self._writing = threading.Lock()
        self._ended = False
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
            "start": start,
        }

    def write(self, **changes: str | int) -> None:
        """Change some of the facts and write all. Does nothing on other ranks or once the run has failed."""
        assert changes.keys() <= self._facts.keys(), changes
        if not self._leads:
            return
        with self._writing:
            found = self._read()
            if self._ended or (found.get("state") == "failed" and found.get("start") == self._start):
                return  # another rank ended the run; this one has not noticed yet
            self._facts |= changes
            self._write(self._facts)

    def fail(self, reason: str) -> None:
        """Write that the run failed and why, unless its end is written already. From any rank and thread.

        Never raises OSError: what ends the run must not wait for a disk that is full.
        """
        self._end("failed", reason)

    def refuse(self, reason: str) -> None:
        """Write that the run failed if the file says running; an earlier end stays. For refused input."""
        if self._read().get("state") == "running":
            self._end("failed", reason)

    def interrupt(self) -> None:
        """Write that the run was stopped by hand, unless its end is written already or it had not begun."""
        if self._read().get("start") == self._start:
            self._end("stopped", "interrupted")

    def _end(self, state: str, reason: str) -> None:
        if not self._writing.acquire(timeout=PATIENCE_S):
            self._warn("is not written: an earlier write hangs")
            return
        try:
            if self._ended or self._is_taken_over():
                return
            self._ended = True
            found = self._read()
            if found.get("start") == self._start:
                if found.get("state") != "running":
                    return
                self._facts = found
            else:  # it failed before it wrote that it is running
                self._facts |= {key: found[key] for key in ("step", "checkpoint_step") if key in found}
            self._write(self._facts | {"state": state, "reason": reason})
        except OSError as error:
            self._warn(f"cannot be written: {error}")
        finally:
            self._writing.release()

    def _warn(self, text: str) -> None:
        print(f"warning: {self._path} {text}", file=sys.stderr, flush=True)

    def _read(self) -> dict:
        """The facts on disk; {} where there are none that can be read."""
        try:
            facts = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def _write(self, facts: dict) -> None:
        text = json.dumps(facts | {"time": round(time.time(), 3)}) + "\n"
        for path in self._paths:
            # A name of its own: ranks may write at once.
            partial = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.partial")
            partial.write_text(text)
            partial.replace(path)  # a reader sees the old or the new one
