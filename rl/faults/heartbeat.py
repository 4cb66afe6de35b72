"""Heartbeats: `<run.dir>/heartbeat/rank_N.json` says where each rank is and that it lives. For people, and for the rank that has
to say which one is at fault when all of them wait."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rl.faults.phase_tracker import Whereabouts, words
from rl.faults.process import GIB, Process, process_from, resident_bytes, this_process

DIRECTORY = "heartbeat"


@dataclass(frozen=True)
class Beat:
    rank: int
    process: Process
    job: str
    """Slurm job id, empty outside of Slurm."""
    phase: str
    step: int
    number: int
    """Changes of place so far, as in `Place`."""
    since: float
    """Unix time at which the rank came to this phase."""
    time: float
    """Unix time of this heartbeat."""
    at: str
    """Innermost frame of the main flow outside of libraries: 'file:line function'."""
    waits: bool
    """Whether it waits for other ranks there."""
    host_memory_gib: float
    device_memory_gib: float
    """Allocated by this process through torch; 0 on CPU."""

    @property
    def place(self) -> str:
        return words(self.phase, self.step)


class Heart:
    """Writes this rank's heartbeat."""

    def __init__(self, run_dir: str, rank: int, where: Whereabouts):
        self._path = beat_path(run_dir, rank)
        self._path.parent.mkdir(exist_ok=True)
        self._rank, self._where, self._process = rank, where, this_process()
        self._job = os.environ.get("SLURM_JOB_ID", "")

    def now(self) -> Beat:
        place = self._where.place
        at, waits = self._where.frame()
        device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        return Beat(
            self._rank,
            self._process,
            self._job,
            place.phase,
            place.step,
            place.number,
            place.since,
            time.time(),
            at,
            waits,
            round(resident_bytes() / GIB, 3),
            round(device / GIB, 3),
        )

    def beat(self) -> None:
        """Write the file, in one rename: a reader sees the old one or the new one."""
        record = asdict(self.now())
        record |= record.pop("process")
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(self._path)


def beat_path(run_dir: str, rank: int) -> Path:
    return Path(run_dir, DIRECTORY, f"rank_{rank}.json")


def read_beat(run_dir: str, rank: int) -> Beat | None:
    """The last heartbeat of a rank; None where there is none that can be read."""
    try:
        record = json.loads(beat_path(run_dir, rank).read_text())
        process = process_from(record)
        values = {name: record[name] for name in Beat.__dataclass_fields__ if name != "process"}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Beat(process=process, **values)


def read_beats(run_dir: str, world_size: int) -> list[Beat | None]:
    return [read_beat(run_dir, rank) for rank in range(world_size)]
