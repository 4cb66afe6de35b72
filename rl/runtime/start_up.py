"""Start-up time from the command to the first step, by part, and imports without garbage collection.

A process starts once, so the parts are state of this module. It imports only the standard library, because
it runs first.
"""

import contextlib
import gc
import os
import time
from pathlib import Path

parts: dict[str, float] = {}
"""Seconds of each part of this process's start-up, in order."""

_last = 0.0
"""End of the previous part, in seconds since boot."""


def begin(*, has_launcher: bool) -> None:
    """Start the measurement. The first part is the time from the launcher's start to this process's start.

    has_launcher: whether the parent process is a launcher. Otherwise this process is the command.
    """
    global _last
    parts.clear()
    _last = _started(os.getpid())
    if not has_launcher or "LOCKSTEP_GENERATION" in os.environ:  # an agent's ranks (`launch.elastic`)
        return
    # Slurm's parent is a daemon of root, which /proc with hidepid does not show; the parent of a container's
    # first process has no number there. The launcher's time is then unknown.
    with contextlib.suppress(OSError):
        parts["launcher"] = max(0.0, _last - _started(os.getppid()))


def mark(part: str) -> None:
    """Add the time since the previous mark to `part`."""
    global _last
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    parts[part] = parts.get(part, 0.0) + now - _last
    _last = now


def count(part: str, seconds: float) -> None:
    """Attribute `seconds` of the time since the previous mark to `part`, not to the part of the next mark."""
    global _last
    parts[part] = parts.get(part, 0.0) + seconds
    _last += seconds


def summary() -> str:
    """Return the total and the parts of at least 0.1 s, the longest first: '7.5 s (imports 3.1, ...)'."""
    longest_first = sorted(parts, key=parts.__getitem__, reverse=True)
    shown = ", ".join(f"{name} {parts[name]:.1f}" for name in longest_first if parts[name] >= 0.1)
    return f"{sum(parts.values()):.1f} s" + f" ({shown})" * bool(shown)


def pause_collection() -> None:
    """Disable garbage collection while modules are imported.

    The imports of torch, transformers, Megatron and vLLM create two million objects and hardly any garbage.
    Repeated collections would take a third of the import time.
    """
    gc.disable()


def resume_collection() -> None:
    """Enable garbage collection and exclude all present objects (modules, classes, functions) from it.

    Call this before the engines are built, because their garbage may hold device memory.
    """
    gc.freeze()
    gc.enable()


def _started(pid: int) -> float:
    """Return the start of a process in seconds since boot, with a resolution of 0.01 s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
