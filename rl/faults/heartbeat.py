"""Heartbeats: `<run.dir>/heartbeat/rank_N.json` holds the current phase of a rank and the time of writing.

People read them, and `rl.faults.diagnosis` finds in them which rank is at fault when ranks wait for each
other.
"""

import json
import os
import time
from collections.abc import Container
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rl.faults.phase_tracker import WAITS, PhaseTracker, phase_label
from rl.faults.process import GIB, ProcessIdentity, process_from, resident_bytes, this_process

DIRECTORY = "heartbeat"
BY_READER = ("silent_s", "age_s")
"""Fields of a heartbeat that its reader fills."""


@dataclass(frozen=True)
class Heartbeat:
    """Content of a rank's file; the fields of `process` are stored beside the others."""

    rank: int
    process: ProcessIdentity
    job: str
    """Slurm job id, empty outside of Slurm."""
    phase: str
    step: int
    number: int
    """Number of phase entries so far, as in `PhaseEntry`."""
    phase_s: float
    """Seconds since the rank entered this phase."""
    time: float
    """Unix time of this heartbeat by the clock of the rank's host, for people."""
    clock: float
    """time.monotonic() of this heartbeat, which is comparable on the same host until it reboots."""
    at: str
    """Innermost frame of the main thread outside of libraries: 'file:line function'."""
    waits: bool
    """Whether the main thread waits for other ranks, or its role for the other one."""
    host_memory_gib: float
    device_memory_gib: float
    """Memory that this process had allocated through torch when it entered the phase, in GiB; 0 on CPU."""
    detail: str = ""
    """Detail of the phase (`PhaseEntry`)."""
    role: str = ""
    """Role and replica of the rank; `number` is comparable among ranks with the same one."""
    silent_s: float = 0.0
    """Seconds since the reader first found this content. Not in the file."""
    age_s: float = 0.0
    """Seconds since the heartbeat was written if reader and rank are on one host, otherwise `silent_s`. Not
    in the file."""

    @property
    def label(self) -> str:
        return phase_label(self.phase, self.step, self.detail)


class HeartbeatWriter:
    """Writes this rank's heartbeat."""

    def __init__(self, run_dir: str, rank: int, tracker: PhaseTracker):
        self._path = heartbeat_path(run_dir, rank)
        self._path.parent.mkdir(exist_ok=True)
        self._rank, self._tracker, self._process = rank, tracker, this_process()
        self._job = os.environ.get("SLURM_JOB_ID", "")

    def measure(self) -> Heartbeat:
        """Return the present state of this rank."""
        entry = self._tracker.current
        at, waits = self._tracker.main_frame()
        return Heartbeat(
            rank=self._rank,
            process=self._process,
            job=self._job,
            phase=entry.phase,
            step=entry.step,
            detail=entry.detail,
            number=entry.number,
            phase_s=round(entry.seconds, 3),
            time=time.time(),
            clock=time.monotonic(),
            at=at,
            waits=waits or entry.phase in WAITS,
            host_memory_gib=round(resident_bytes() / GIB, 3),
            device_memory_gib=round(entry.device_bytes / GIB, 3),
            role=self._tracker.role,
        )

    def write(self) -> None:
        """Replace the file in one rename, so that a reader sees the old content or the new one."""
        record = asdict(self.measure())
        record |= record.pop("process")
        for name in BY_READER:
            del record[name]
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(self._path)


def heartbeat_path(run_dir: str, rank: int) -> Path:
    return Path(run_dir, DIRECTORY, f"rank_{rank}.json")


def read_heartbeat(run_dir: str, rank: int) -> Heartbeat | None:
    """Return the last heartbeat of a rank, or None if there is no readable one."""
    try:
        record = json.loads(heartbeat_path(run_dir, rank).read_text())
        process = process_from(record)
        fields = Heartbeat.__dataclass_fields__.keys() - {"process", *BY_READER}
        values = {name: record[name] for name in fields}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Heartbeat(process=process, **values)


class HeartbeatReader:
    """Reads the heartbeats of all ranks, and measures by its own clock how long each has not changed.

    The clocks of hosts may differ by minutes. Therefore times written by another host are not compared with
    the clock of this host.
    """

    def __init__(self, run_dir: str, world_size: int):
        self._run_dir = run_dir
        self._found: list[tuple[Heartbeat, float] | None] = [None] * world_size
        """The last content of each file, and when it was first found."""

    def read(self, ranks: Container[int] | None = None) -> list[Heartbeat | None]:
        """Return the heartbeats by rank, None for ranks without one and outside of `ranks` (None: all)."""
        every = range(len(self._found))
        return [self._read(rank) if rank in (every if ranks is None else ranks) else None for rank in every]

    def _read(self, rank: int) -> Heartbeat | None:
        beat, now = read_heartbeat(self._run_dir, rank), time.monotonic()
        if beat is None:
            return None
        known = self._found[rank]
        if known is None or known[0] != beat:
            self._found[rank] = known = beat, now
        silent_s = now - known[1]
        age_s = now - beat.clock if beat.process.shares_clock() else silent_s
        return replace(beat, silent_s=silent_s, age_s=age_s)
