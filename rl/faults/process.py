"""Facts about processes, read from /proc: who one is, whether one still runs, what it holds. Linux only."""

import ctypes
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GIB = float(1 << 30)


@dataclass(frozen=True)
class Process:
    """A process that can be told from any other, also from a later one with the same number."""

    host: str
    pid: int
    started: int
    """Start time in clock ticks after boot."""
    space: str
    """Boot id and process namespace: within one space a pid means one process. Containers on one host have spaces of their own."""

    def is_gone(self) -> bool | None:
        """Whether it has ended, zombies included. None: it belongs to another host or namespace, where this one cannot look."""
        if self.space != _space():
            # A host that was booted anew runs none of the processes from before.
            return True if self.host == platform.node() and self._boot() != _boot_id() else None
        return _start_time(self.pid) != self.started

    def _boot(self) -> str:
        return self.space.partition("/")[0]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def this_process() -> Process:
    pid = os.getpid()
    started = _start_time(pid)
    assert started is not None
    return Process(platform.node(), pid, started, _space())


def process_from(record: dict[str, Any]) -> Process:
    """The process of a record that holds `as_dict`'s keys among others. KeyError or TypeError if it does not."""
    return Process(str(record["host"]), int(record["pid"]), int(record["started"]), str(record["space"]))


def resident_bytes() -> int:
    """Memory of this process that is in RAM, shared pages included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def return_free_memory() -> None:
    """Have the C library return freed memory to the system. Between tensors of many sizes it keeps more and more of it: a few
    per cent in a hundred steps of a small run. Does nothing where the library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _start_time(pid: int) -> int | None:
    """None if there is no such process, or only what is left of it until its parent asks for its exit code."""
    try:
        # The second field is the program's name in parentheses, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _space() -> str:
    return f"{_boot_id()}/{os.readlink('/proc/self/ns/pid')}"


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
