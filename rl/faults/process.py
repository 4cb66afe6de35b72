"""Identity, liveness and memory of processes, read from /proc. Linux only."""

import ctypes
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GIB = float(1 << 30)
TRIM_GROWTH = 1.1
"""Freed host memory is returned to the system when resident memory has grown by this factor since the last
return. Returning it in each step costs time: mapping the memory again caused half of the page faults of a
small step. Never returning it costs memory: a model of 135 million parameters grew from 3.0 to 5.5 GiB per
rank in six steps on CPUs, and 1.7 GiB of it were free."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process: a later process with the same pid has another one."""

    host: str
    pid: int
    started: int
    """Start time in clock ticks after boot."""
    space: str
    """Boot id and pid namespace. Containers on one host have namespaces of their own."""

    def is_gone(self) -> bool | None:
        """Return whether the process has ended (a zombie has), or None if this process cannot see it."""
        if self.space != _space():
            # A host that was rebooted runs none of the earlier processes.
            rebooted = self.host == platform.node() and self.space.partition("/")[0] != _boot_id()
            return True if rebooted else None
        return _start_time(self.pid) != self.started

    def shares_clock(self) -> bool:
        """Return whether time.monotonic() of the process is comparable with this process's."""
        return self.space.partition("/")[0] == _boot_id()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def this_process() -> ProcessIdentity:
    pid = os.getpid()
    started = _start_time(pid)
    assert started is not None
    return ProcessIdentity(platform.node(), pid, started, _space())


def process_from(record: dict[str, Any]) -> ProcessIdentity:
    """Return the process of a record with `as_dict`'s keys. Raises KeyError or TypeError without them."""
    return ProcessIdentity(
        str(record["host"]), int(record["pid"]), int(record["started"]), str(record["space"])
    )


def is_dead(record: dict[str, Any]) -> bool:
    """Return whether a record names a process of this host that has ended; False for any other record."""
    try:
        return process_from(record).is_gone() is True
    except (KeyError, TypeError, ValueError):
        return False


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, shared pages included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def host_bytes_used() -> int:
    """Return the memory of this host that is not available to new programs, in bytes."""
    kib = _host_memory()
    return (kib["MemTotal:"] - kib["MemAvailable:"]) << 10


def host_bytes_available() -> int:
    """Return the memory of this host that is available to new programs, in bytes."""
    return _host_memory()["MemAvailable:"] << 10


def _host_memory() -> dict[str, int]:
    """Return the fields of /proc/meminfo, in KiB."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: int(value) for name, value, *_ in lines}


def return_free_memory() -> None:
    """Make glibc return freed memory to the system; does nothing with another C library.

    Otherwise freed memory between tensors of many sizes accumulates.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks; None if there is none, or only a zombie."""
    try:
        # The second field is the program's name in parentheses, which may hold any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _space() -> str:
    return f"{_boot_id()}/{os.readlink('/proc/self/ns/pid')}"


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
