"""`<run.dir>/lock.json`: lets one run at a time write into a run directory. For rank 0.

Two jobs in one directory would overwrite each other's checkpoints and metrics while each looks healthy. The
lock names the process that holds it. A process takes it by linking a complete file to the lock's name, which
only one process can do, also on NFS. The lock of an ended run is taken over. If a run was taken over by
mistake (its host hung for minutes), `check_lock` ends it before it writes again.
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
from rl.run_directory.record import writing
from rl.run_directory.status import FILE_NAME as STATUS
from rl.sandbox.private_directory import make_private

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
    before: str = ""
    """Token of the start that status.json named when this one took the lock."""

    @classmethod
    def take(cls, directory: Path, *, silent_s: float, watch_s: float = 0.0) -> "RunLock":
        """Take the directory's lock; replace a stale one.

        silent_s: seconds without a heartbeat after which a run on another host counts as ended, if Slurm
        gives no answer. watch_s: seconds for which the heartbeat is then watched and must not change, because
        the dates of files may come from a host with a wrong clock. Raises ValueError, which names host, pid
        and job, if a live run holds the lock.
        """
        path, token = directory / FILE_NAME, uuid.uuid4().hex
        mine = path.with_name(f"{FILE_NAME}.{token}")
        mine.write_text(json.dumps(_record(token), indent=1) + "\n")
        try:
            if not _link(mine, path):
                _replace_stale(mine, path, silent_s, watch_s)
        finally:
            mine.unlink(missing_ok=True)
        return cls(path, token, (_read(directory / STATUS) or {}).get("start", ""))

    def is_held(self) -> bool:
        """Return whether this run still holds the lock. A lock that cannot be read counts as held."""
        owner = _read(self.path)
        return owner is not None and owner.get("token", self.token) == self.token

    def release(self) -> None:
        if (_read(self.path) or {}).get("token") == self.token:
            self.path.unlink(missing_ok=True)  # watchdog and main thread may both end this process


def check_lock(*locks: RunLock | None) -> None:
    """Raise LockLost if this run no longer holds these locks. None, as on ranks other than 0, passes.

    Call it before any write that could replace or extend a file of another run.
    """
    for lock in locks:
        if lock is not None and not lock.is_held():
            raise LockLost(loss_of(lock.path.parent))


def loss_of(directory: Path) -> str:
    """Return the error of a run that was taken over, which names the present holder of the lock."""
    owner = _read(directory / FILE_NAME)
    state = f"is now that of {_name(owner)}" if owner else "was released or taken over, and no run holds it"
    return f"{directory} {state}: this run was considered dead, and ends before it writes there."


def is_of_another(run_dir: str, token: str, before: str) -> bool:
    """Return whether a start with another token holds the directory, or held it after this one.

    If the lock is released, the status names the last start. If this start has not yet written the status, it
    still names the start before, with the token `before`. An unreadable file names no start.
    """
    owner = _read(Path(run_dir, FILE_NAME))
    if owner is not None:
        return owner.get("token", "") not in ("", token)
    return (_read(Path(run_dir, STATUS)) or {}).get("start", "") not in ("", token, before)


def generation() -> int:
    """Return the number of this start of an elastic run (`launch.elastic`); 0 for another run."""
    return int(os.environ.get("LOCKSTEP_GENERATION", "0"))


def _record(token: str) -> dict[str, Any]:
    return this_process().as_dict() | {
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        "generation": generation(),
        "time": time.time(),
        "token": token,
    }


def _link(source: Path, path: Path) -> bool:
    """Give `source` a second name, atomically; return False if that name exists."""
    try:
        os.link(source, path)
    except FileExistsError:
        # An NFS client repeats a request if the answer was lost, and then finds its own link.
        try:
            return source.samefile(path)
        except FileNotFoundError:  # the other run has removed its link meanwhile
            return False
    return True


def _replace_stale(mine: Path, path: Path, silent_s: float, watch_s: float) -> None:
    """Replace a stale lock by `mine`. Raise ValueError if the lock is not stale, or another run is faster."""
    owner = _read(path)
    if owner is None:  # released meanwhile
        if _link(mine, path):
            return
        owner = _read(path) or {}
    reason = _why_stale(owner, path.parent, silent_s, watch_s)
    if reason is None:
        raise ValueError(
            f"{path.parent} is in use by a live run, {_name(owner)}; wait for it, end it, or set another "
            f"run.dir. If that run is dead, remove {path}."
        )
    # If several runs find the same stale lock, only one of them gets this name, and only while the lock
    # exists.
    claim = path.with_name(f"{FILE_NAME}.after-{owner.get('token', 'unreadable')}")
    if 0 < (_read(claim) or {}).get("generation", 0) < generation():
        claim.unlink(missing_ok=True)  # of an earlier generation of this elastic run, which was killed here
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


def _why_stale(owner: dict[str, Any], directory: Path, silent_s: float, watch_s: float) -> str | None:
    """Return why the lock's owner has ended, or None if it may be alive."""
    if 0 < owner.get("generation", 0) < generation():
        return "an earlier generation of this elastic run"  # its members were ended, or are to end themselves
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
    if silent <= silent_s or _changes(heartbeat_path(str(directory), 0), watch_s):
        return None
    return f"no heartbeat for {silent:.0f} s"


def _job_states(job: str) -> set[str] | None:
    """Return the states that squeue lists for a job; empty if the job is gone, None without an answer.

    A job whose epilog hangs is COMPLETING for long, but Slurm lists none of its steps.
    """
    states = _squeue(job, "--states=all", "--format=%T")
    if states != {"COMPLETING"} or (steps := _squeue(job, "--steps", "--format=%i")) is None:
        return states
    return states if any(not step.endswith(".extern") for step in steps) else {"COMPLETING without steps"}


def _squeue(job: str, *options: str) -> set[str] | None:
    command = ["squeue", "--noheader", f"--jobs={job}", *options]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if out.returncode and "Invalid job id" in out.stderr:  # Slurm forgets a job after minutes
        return set()
    return None if out.returncode else set(out.stdout.split())


def _silence(directory: Path) -> float:
    """Return the seconds since rank 0's heartbeat or the lock last changed, by the clock of the file
    server."""
    probe = directory / f"{FILE_NAME}.{uuid.uuid4().hex}"
    probe.write_text("")
    now = probe.stat().st_mtime
    probe.unlink()
    paths = (directory / FILE_NAME, heartbeat_path(str(directory), 0))
    return now - max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def _changes(path: Path, seconds: float) -> bool:
    """Return whether the content of a file changes within so many seconds; False if there is no file."""
    deadline, first = time.monotonic() + seconds, _read(path)
    while first is not None and time.monotonic() < deadline:
        time.sleep(min(0.5, seconds))
        if _read(path) != first:
            return True
    return False


def _read(path: Path) -> dict[str, Any] | None:
    """Return the record of a lock, status or heartbeat; None if there is none, {} if it is unreadable."""
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
    """Make run.dir, closed to other users, check that it is writable, and lock it.

    run.dir itself may be a symbolic link, for example to scratch; its entries must not lead out of it.
    Raises ValueError if it is not writable, another run uses it, or an entry leads out of it.
    """
    directory, watchdog = Path(config.run.dir), config.watchdog
    with writing(directory):
        make_private(directory)
        refuse_links(directory)
        if (directory / "checkpoints").is_dir():
            make_private(directory / "checkpoints")
        with tempfile.TemporaryFile(dir=directory):
            pass
        lock = RunLock.take(directory, silent_s=watchdog.lost_s, watch_s=3 * watchdog.beat_s + 2)
    shutil.rmtree(directory / heartbeat.DIRECTORY, ignore_errors=True)  # of an earlier start
    return lock


def refuse_links(directory: Path) -> None:
    """Raise ValueError if an entry of the directory is a symbolic link out of it."""
    inside = directory.resolve()
    for entry in directory.iterdir():
        target = Path(os.path.realpath(entry))  # Path.resolve raises RuntimeError for a loop
        if entry.is_symlink() and not target.is_relative_to(inside):
            raise ValueError(
                f"{entry} is a symbolic link to {target}, outside of the run directory, where a run "
                "would write and remove files; remove the link, or make run.dir itself the link."
            )
