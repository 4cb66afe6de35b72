"""`<run.dir>/lock.json`: one run at a time writes into a run directory. For rank 0.

Two jobs in one directory overwrite each other's checkpoints and metrics, and each looks healthy. The lock holds who is in
there; it is taken by linking a finished file to its name, which only one can do, also on NFS. A lock whose run is no more is
taken over. A run that was taken over by mistake (its host hung for minutes) notices before it writes again: `still_mine`.
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
from rl.faults.heartbeat import beat_path
from rl.faults.process import process_from, this_process

FILE_NAME = "lock.json"

LIVE_STATES = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING", "SIGNALING", "STAGE_OUT"}
"""Of a Slurm job that may still have processes."""

SQUEUE_S = 20.0


class LockLost(RuntimeError):
    """Another run has taken this run's directory over."""


@dataclass(frozen=True)
class RunLock:
    """The lock of a run directory, held."""

    path: Path
    token: str

    @classmethod
    def take(cls, directory: Path, *, silent_s: float) -> "RunLock":
        """Take the directory's lock, over a stale one if need be.

        silent_s: seconds without a heartbeat after which a run elsewhere counts as ended, if Slurm cannot tell.
        Raises ValueError, naming host, pid and job, if a live run holds it.
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

    def still_mine(self) -> bool:
        """Whether this run holds the lock still. To ask before anything in the directory is made current or removed."""
        return (_read(self.path) or {}).get("token") == self.token

    def release(self) -> None:
        if self.still_mine():
            self.path.unlink(missing_ok=True)  # the thread and the main flow may both end this process


def check_lock(lock: RunLock | None) -> None:
    """Raise LockLost if the run directory is not this run's any more; None, on ranks other than 0, passes."""
    if lock is not None and not lock.still_mine():
        owner = _read(lock.path)
        whose = f"is now that of {_words(owner)}" if owner else "has no lock any more"
        raise LockLost(
            f"{lock.path.parent} {whose}: this run was taken for dead, and ends before it writes there again."
        )


def is_of_another(run_dir: str, token: str) -> bool:
    """Whether the directory's lock is held with another token. A lock that was released is nobody's."""
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
    """Give `source` a second name, whole and at once; False if somebody has that name."""
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    return True


def _replace_stale(mine: Path, path: Path, silent_s: float) -> None:
    """Put `mine` in the place of a stale lock. ValueError if the lock is not stale, or another run is faster."""
    owner = _read(path)
    if owner is None:  # released in between
        if _link(mine, path):
            return
        owner = _read(path) or {}
    reason = _why_stale(owner, path.parent, silent_s)
    if reason is None:
        raise ValueError(
            f"{path.parent} is in use by a live run, {_words(owner)}; wait for it, end it, or set another run.dir. "
            f"If that run is dead, remove {path}."
        )
    # Only one of several that come for the same stale lock gets this name, and it finds that lock still there.
    claim = path.with_name(f"{FILE_NAME}.after-{owner.get('token', 'unreadable')}")
    if not _link(mine, claim):
        raise ValueError(
            f"another run is taking {path.parent} over just now; if there is none, remove {claim}."
        )
    try:
        if (_read(path) or {}).get("token") != owner.get("token"):
            raise ValueError(f"another run has just taken {path.parent} over; set another run.dir.")
        os.replace(mine, path)
    finally:
        claim.unlink()
    print(
        f"the lock of {path.parent} was left behind by {_words(owner)} ({reason}); taken over",
        file=sys.stderr,
        flush=True,
    )


def _why_stale(owner: dict[str, Any], directory: Path, silent_s: float) -> str | None:
    """Why the lock's owner is no more; None if it lives, or may."""
    try:
        gone, job = process_from(owner).is_gone(), str(owner["job"])
    except (KeyError, TypeError, ValueError):
        return "it cannot be read"
    if gone is not None:
        return "its process has ended" if gone else None
    if (
        job
        and job == os.environ.get("SLURM_JOB_ID")
        and owner["restarts"] < int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    ):
        return "an earlier start of this job"  # Slurm has ended all of it before it starts the job again
    if job and shutil.which("squeue"):
        states = _job_states(job)
        if states is not None and not states & LIVE_STATES:
            return f"Slurm has job {job} as {', '.join(sorted(states)) or 'ended'}"
        if states is not None:
            return None
    silent = _silence(directory)
    return f"no heartbeat for {silent:.0f} s" if silent > silent_s else None


def _job_states(job: str) -> set[str] | None:
    """States that squeue knows of a job; empty if it has left the queue, None if squeue does not answer."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if out.returncode and "Invalid job id" in out.stderr:  # Slurm forgets a job after minutes
        return set()
    return None if out.returncode else set(out.stdout.split())


def _silence(directory: Path) -> float:
    """Seconds since the owner's last sign of life: rank 0's heartbeat, or the lock itself. By the file server's clock."""
    probe = directory / f"{FILE_NAME}.{uuid.uuid4().hex}"
    probe.write_text("")
    now = probe.stat().st_mtime
    probe.unlink()
    signs = [
        path.stat().st_mtime
        for path in (directory / FILE_NAME, beat_path(str(directory), 0))
        if path.exists()
    ]
    return now - max(signs, default=0.0)


def _read(path: Path) -> dict[str, Any] | None:
    """The lock's record; None if there is no lock, empty if it cannot be read."""
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _words(owner: dict[str, Any]) -> str:
    if "host" not in owner:
        return "an unknown run"
    job = f", Slurm job {owner['job']}" if owner.get("job") else ""
    return f"process {owner.get('pid')} on {owner['host']}{job}"


def make_run_directory(config: Config) -> RunLock:
    """Make run.dir with the user's umask, see that it can be written to and that nobody else does, before anything is built.

    run.dir itself may be a symbolic link, to scratch for example; what is in it may not lead out of it.
    Raises OSError if it cannot be written to, ValueError if another run is using it or something in it leads elsewhere.
    """
    directory = Path(config.run.dir)
    directory.mkdir(parents=True, exist_ok=True)
    refuse_links(directory)
    with tempfile.TemporaryFile(dir=directory):
        pass
    lock = RunLock.take(directory, silent_s=config.watchdog.lost_s)
    shutil.rmtree(directory / heartbeat.DIRECTORY, ignore_errors=True)  # of ranks that are no more
    return lock


def refuse_links(directory: Path) -> None:
    """ValueError if an entry of the directory is a symbolic link out of it: a run would write and remove files there."""
    inside = directory.resolve()
    for entry in directory.iterdir():
        if entry.is_symlink() and not entry.resolve().is_relative_to(inside):
            raise ValueError(
                f"{entry} is a symbolic link to {entry.resolve()}, outside of the run directory, where a run would write and remove "
                "files; remove the link, or make run.dir itself the link."
            )
