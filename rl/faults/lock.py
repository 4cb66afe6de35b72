"""`<run.dir>/lock.json`: lets one run at a time write into a run directory. For rank 0.

Two jobs in one directory would overwrite each other's checkpoints and metrics while each looks healthy. The
lock names the process that holds it. A process takes it by linking a complete file to the lock's name, which
only one process can do, also on NFS. A lock whose run has ended is taken over. If a run was taken over by
mistake (its host hung for minutes), `RunLock.is_held` reports that before the run writes again.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.schema import Config
from rl.faults import heartbeat
from rl.faults.heartbeat import heartbeat_path
from rl.faults.process import process_from, this_process

FILE_NAME = "lock.json"

LIVE_STATES = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING", "SIGNALING", "STAGE_OUT"}
"""States of a Slurm job that may still have processes."""

SQUEUE_S = 20.0
"""Time limit of a call of squeue, in seconds."""


class LockLost(RuntimeError):
    """Raised when another run has taken over this run's directory."""


@dataclass(frozen=True)
class RunLock:
    """The lock of a run directory, held by this run."""

    path: Path
    token: str

    @classmethod
    def take(cls, directory: Path, *, silent_s: float) -> "RunLock":
        """Take the directory's lock; replace a stale one.

        silent_s: seconds without a heartbeat after which a run on another host counts as ended, if Slurm has
        no answer.
        Raises ValueError, which names host, pid and job, if a live run holds the lock.
        """
        path, token = directory / FILE_NAME, uuid.uuid4().hex
        mine = path.with_name(f"{FILE_NAME}.{token}")
        mine.write_text(json.dumps(_record(token), indent=1) + "\n")
        try:
            if not _link(mine, path):
                _replace_stale(mine, path, silent_s)
        finally:
            mine.unlink(missing_ok=True)
        return cls(path, token)

    def is_held(self) -> bool:
        """Return whether this run still holds the lock. Check before replacing or removing files there."""
        return (_read(self.path) or {}).get("token") == self.token

    def release(self) -> None:
        if self.is_held():
            self.path.unlink(missing_ok=True)  # watchdog and main thread may both end this process


def check_lock(lock: RunLock | None) -> None:
    """Raise LockLost if this run no longer holds the lock. None, as on ranks other than 0, passes."""
    if lock is not None and not lock.is_held():
        owner = _read(lock.path)
        state = f"is now that of {_name(owner)}" if owner else "has no lock any more"
        raise LockLost(
            f"{lock.path.parent} {state}: this run was considered dead, and ends before it writes there."
        )


def is_of_another(run_dir: str, token: str) -> bool:
    """Return whether the directory is locked with another token.

    A released lock belongs to no run.
    """
    owner = _read(Path(run_dir, FILE_NAME))
    return owner is not None and owner.get("token") != token


def _record(token: str) -> dict[str, Any]:
    return this_process().as_dict() | {
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        "time": time.time(),
        "token": token,
    }


def _link(source: Path, path: Path) -> bool:
    """Give `source` a second name, atomically; return False if that name exists."""
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    return True


def _replace_stale(mine: Path, path: Path, silent_s: float) -> None:
    """Replace a stale lock by `mine`. Raise ValueError if the lock is not stale, or another run is faster."""
    owner = _read(path)
    if owner is None:  # released meanwhile
        if _link(mine, path):
            return
        owner = _read(path) or {}
    reason = _why_stale(owner, path.parent, silent_s)
    if reason is None:
        raise ValueError(
            f"{path.parent} is in use by a live run, {_name(owner)}; wait for it, end it, or set another "
            f"run.dir. If that run is dead, remove {path}."
        )
    # If several runs find the same stale lock, one gets this name, and only while that lock still exists.
    claim = path.with_name(f"{FILE_NAME}.after-{owner.get('token', 'unreadable')}")
    if not _link(mine, claim):
        raise ValueError(f"another run is taking over {path.parent}; if there is none, remove {claim}.")
    try:
        if (_read(path) or {}).get("token") != owner.get("token"):
            raise ValueError(f"another run has just taken over {path.parent}; set another run.dir.")
        os.replace(mine, path)
    finally:
        claim.unlink()
    message = f"the lock of {path.parent} was left behind by {_name(owner)} ({reason}); taken over"
    print(message, file=sys.stderr, flush=True)


def _why_stale(owner: dict[str, Any], directory: Path, silent_s: float) -> str | None:
    """Return why the lock's owner has ended, or None if it may be alive."""
    try:
        gone, job = process_from(owner).is_gone(), str(owner["job"])
    except (KeyError, TypeError, ValueError):
        return "it cannot be read"
    if gone is not None:
        return "its process has ended" if gone else None
    if job and job == os.environ.get("SLURM_JOB_ID"):
        if owner["restarts"] < int(os.environ.get("SLURM_RESTART_COUNT", "0")):
            return "an earlier start of this job"  # Slurm ends all of it before it starts the job again
    states = _job_states(job) if job and shutil.which("squeue") else None
    if states is not None:
        live = states & LIVE_STATES
        return None if live else f"Slurm reports job {job} as {', '.join(sorted(states)) or 'ended'}"
    silent = _silence(directory)
    return f"no heartbeat for {silent:.0f} s" if silent > silent_s else None


def _job_states(job: str) -> set[str] | None:
    """Return the states that squeue lists for a job; empty if the job is gone, None without an answer."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if out.returncode and "Invalid job id" in out.stderr:  # Slurm forgets a job after minutes
        return set()
    return None if out.returncode else set(out.stdout.split())


def _silence(directory: Path) -> float:
    """Return seconds since the last change of rank 0's heartbeat or the lock, by the file server's clock."""
    probe = directory / f"{FILE_NAME}.{uuid.uuid4().hex}"
    probe.write_text("")
    now = probe.stat().st_mtime
    probe.unlink()
    paths = (directory / FILE_NAME, heartbeat_path(str(directory), 0))
    return now - max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def _read(path: Path) -> dict[str, Any] | None:
    """Return the lock's record; None if there is no lock, {} if it is unreadable."""
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _name(owner: dict[str, Any]) -> str:
    """Return 'process 4711 on node1, Slurm job 1234'."""
    if "host" not in owner:
        return "an unknown run"
    job = f", Slurm job {owner['job']}" if owner.get("job") else ""
    return f"process {owner.get('pid')} on {owner['host']}{job}"


def make_run_directory(config: Config) -> RunLock:
    """Make run.dir with the user's umask, check that it is writable, and lock it.

    run.dir itself may be a symbolic link, for example to scratch; its entries must not lead out of it.
    Raises OSError if it is not writable, ValueError if another run uses it or an entry leads out of it.
    """
    directory = Path(config.run.dir)
    directory.mkdir(parents=True, exist_ok=True)
    refuse_links(directory)
    with tempfile.TemporaryFile(dir=directory):
        pass
    lock = RunLock.take(directory, silent_s=config.watchdog.lost_s)
    shutil.rmtree(directory / heartbeat.DIRECTORY, ignore_errors=True)  # of an earlier start
    return lock


def refuse_links(directory: Path) -> None:
    """Raise ValueError if an entry of the directory is a symbolic link out of it."""
    inside = directory.resolve()
    for entry in directory.iterdir():
        if entry.is_symlink() and not entry.resolve().is_relative_to(inside):
            raise ValueError(
                f"{entry} is a symbolic link to {entry.resolve()}, outside of the run directory, where a run "
                "would write and remove files; remove the link, or make run.dir itself the link."
            )
