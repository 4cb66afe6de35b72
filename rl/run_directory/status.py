"""`<run.dir>/status.json`: the state of a run, for people, batch scripts and launch tools.

    {"state": "running", "step": 12, "checkpoint_step": 10, "max_steps": 100, "reason": "", "job": "4711_2",
     "restarts": 0, "host": "node1", "pid": 4242, "run": "81d0...", "start": "9f2c...", "time": 1763770000.0}

state: running, stopped (can continue), finished, failed. Rank 0 writes the progress. The rank that ends the
run writes its end and cause; the first cause remains. If all ranks are killed at once, the state remains
running, and `time` is the time of the last write. `start` identifies a start of the run, `run` the first
start in this directory. A copy is written to the file that LOCKSTEP_STATUS names, from which slurm/starts.sh
reads whether a start of the run wrote a newer checkpoint.
"""

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rl.config.options import ConfigError

FILE_NAME = "status.json"

PATIENCE_S = 5.0
"""Maximum wait for a write of another thread when a run ends, in seconds. It is limited because a file system
may hang."""


def read_object(path: Path) -> dict:
    """Return the JSON object in a file, {} if it is missing, incomplete or has another form."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def refuse_missing(run_dir: str | Path, key: str = "") -> None:
    """Raise ConfigError if a run directory does not exist. key: `KEY=` that named it, if any."""
    if not Path(run_dir).is_dir():
        raise ConfigError(f"there is no directory {key}{run_dir}; lockstep status lists the runs.")


def why_no_step(run_dir: Path) -> str:
    """Return why no step of a run has ended and what to do, or "" if status.json does not tell."""
    status = read_object(run_dir / FILE_NAME)
    if status.get("step"):
        return ""
    reason = " ".join(str(status.get("reason", "")).split()).removesuffix(".")
    return {
        "failed": f"the run failed: {reason}. Correct this, and start it again",
        "stopped": f"the run was stopped: {reason}. The same command continues it",
        "running": f"no step has ended yet; lockstep status {run_dir} says whether it still runs",
    }.get(status.get("state", ""), "")


class Status:
    """The status of one start of a run. A change is on disk when the call returns. Thread-safe.

    Args:
        leads: whether this is rank 0. Only rank 0 writes progress; every rank may write the end.
        start: token of the run directory's lock, identical on all ranks.
        is_taken_over: returns whether another start holds the directory, or held it after this start. If so,
            this start writes nothing.
        is_copied: whether to write the file that LOCKSTEP_STATUS names, too.
    """

    def __init__(
        self,
        run_dir: str,
        *,
        max_steps: int,
        leads: bool,
        start: str = "",
        is_taken_over: Callable[[], bool] = lambda: False,
        is_copied: bool = True,
    ):
        also = os.environ.get("LOCKSTEP_STATUS") if is_copied else None
        self._leads, self._start, self.is_taken_over = leads, start, is_taken_over
        self._path = Path(run_dir, FILE_NAME)
        self._paths = [self._path, *([Path(also)] if also else [])]
        self._writing = threading.Lock()
        self._ended = self._fails = False
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
            "run": read_object(self._path).get("run") or start,
            "start": start,
        }

    def write(self, **changes: str | int) -> None:
        """Change some fields and write all.

        Does nothing on ranks other than 0, once the run has failed, or if it was taken over.
        """
        assert changes.keys() <= self._facts.keys(), changes
        if not self._leads:
            return
        with self._writing:
            found = read_object(self._path)
            if self._ended or (found.get("state") == "failed" and found.get("start") == self._start):
                return  # another rank has ended the run
            if self.is_taken_over():
                return
            self._facts |= changes
            try:
                self._write(self._facts)
                self._fails = False
            except OSError as error:  # the next write has these changes, too
                if not self._fails:
                    self._warn(f"cannot be written: {error}; the run goes on, and tries again")
                self._fails = True

    def fail(self, reason: str) -> None:
        """Write that the run failed and why, unless its end is written already. For any rank and thread.

        Never raises OSError, so that a full disk cannot prevent the end of a run.
        """
        self._end("failed", reason)

    def refuse(self, reason: str) -> None:
        """Write that the run failed if the state is running; an earlier end remains. For rejected input."""
        if read_object(self._path).get("state") == "running":
            self._end("failed", reason)

    def interrupt(self, reason: str = "interrupted") -> None:
        """Write that Ctrl-C or `reason` stopped the run, unless it has not begun or its end is written."""
        if read_object(self._path).get("start") == self._start:
            self._end("stopped", reason)

    def _end(self, state: str, reason: str) -> None:
        if not self._writing.acquire(timeout=PATIENCE_S):
            self._warn("cannot be written: an earlier write hangs")
            return
        try:
            if self._ended or self.is_taken_over():
                return
            self._ended = True
            found = read_object(self._path)
            if found.get("start") == self._start:
                if found.get("state") != "running":
                    return
                self._facts = found
            else:  # it failed before its first write
                self._facts |= {key: found[key] for key in ("step", "checkpoint_step") if key in found}
            self._write(self._facts | {"state": state, "reason": reason})
        except OSError as error:
            self._warn(f"cannot be written: {error}")
        finally:
            self._writing.release()

    def _warn(self, text: str) -> None:
        print(f"warning: {self._path} {text}", file=sys.stderr, flush=True)

    def _write(self, facts: dict) -> None:
        text = json.dumps(facts | {"time": round(time.time(), 3)}) + "\n"
        for path in self._paths:
            # A name per process, because several ranks may write at the same time.
            partial = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.partial")
            try:
                partial.write_text(text)
                partial.replace(path)  # readers see the old content or the new
            except OSError:
                partial.unlink(missing_ok=True)
                if not path.is_file():
                    raise
                with open(path, "r+") as file:  # a full disk has no room for a second file
                    file.write(text)
                    file.truncate()
