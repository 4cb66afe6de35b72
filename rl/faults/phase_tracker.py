"""The phase and step that the main thread of this rank is in, and since when."""

import faulthandler
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch

from rl.config.limits import PhaseLimits
from rl.runtime import tracing

WAITS = ("wait_samples", "wait_weights")
"""Phases of a role that waits for the other role."""

PHASES = (
    "start_up",
    "generate",
    "score",
    "log_probs",
    "update",
    "refit",
    "save",
    "other",
    "environments",
    *WAITS,
)

BACKSTOP_S = 6.0
"""Delay of the backstop after a phase's limit, in seconds.

The backstop is a C thread that writes the stacks and ends the process without the interpreter lock. It
fires only if native code holds that lock; otherwise the watchdog is first.
"""

WAITING = ("/torch/distributed/", "/vllm/distributed/", "/pipeline_parallel/p2p_communication.py")
"""Paths of the innermost frame of a rank that waits for other ranks."""

PACKAGE = str(Path(__file__).resolve().parents[1])
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")
STORE = ("/rl/runtime/job_store.py", "/rl/runtime/store_server.py")
"""Files whose functions wait for a message. Reports name their caller instead, for example rendezvous.py."""


@dataclass(frozen=True)
class PhaseEntry:
    """One entry of the main thread into a phase."""

    phase: str
    step: int
    number: int
    """Number of entries so far. Every rank runs the same program, so a rank with a lower number is behind."""
    entered: float
    """time.monotonic() of the entry."""
    limit_s: float
    detail: str = ""
    """Text for reports."""
    device_bytes: int = 0
    """Memory that this process had allocated through torch on its GPU at the entry."""

    @property
    def seconds(self) -> float:
        """Seconds since the entry."""
        return time.monotonic() - self.entered

    @property
    def label(self) -> str:
        return phase_label(self.phase, self.step, self.detail)


def phase_label(phase: str, step: int, detail: str = "") -> str:
    """Return 'score of step 3', 'start-up', or 'waiting for environments (12 live, ...) of step 3'."""
    if phase == "environments":
        phase = f"waiting for environments ({detail})"
    if phase in WAITS:
        return f"waiting for {phase.removeprefix('wait_')} in step {step}"
    return "start-up" if phase == "start_up" else f"{phase} of step {step}"


class PhaseTracker:
    """The current phase of this rank, written by the main thread and read by the watchdog's thread.

    Args:
        limits: seconds per phase.
        backstop: open file to which the backstop writes the stacks (see BACKSTOP_S).
    """

    def __init__(self, limits: PhaseLimits, backstop: TextIO):
        self._limits, self._backstop = limits, backstop
        self._main_thread = threading.main_thread().ident
        self._number = 0
        self._outer: PhaseEntry
        """The phase that a wait for environments is part of."""
        self.role = ""
        """Role and replica of this rank; numbers of phases are comparable among ranks with the same one."""
        self.enter("start_up", 0)

    def follow(self, thread: threading.Thread) -> None:
        """Report the stack of this thread, which does the work now, instead of the main thread's."""
        self._main_thread = thread.ident

    def enter(self, phase: str, step: int) -> None:
        """Make this the current phase."""
        self._number += 1
        limit_s = getattr(self._limits, phase)
        # The main thread reads this, not the watchdog. The current GPU is a setting of a thread, and if the
        # main thread hangs in the allocator, a watchdog that asks the allocator would hang, too.
        device_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        entry = PhaseEntry(phase, step, self._number, time.monotonic(), limit_s, device_bytes=device_bytes)
        self._set(entry)

    def _set(self, entry: PhaseEntry, seconds: float = 0.0) -> None:
        """Make this the current phase. seconds: time of it that has already passed."""
        # One assignment, so that the watchdog never reads a new phase with an old time.
        self.current = entry
        tracing.mark_phase(entry.phase)
        delay = min(max(entry.limit_s - seconds, 0.0) + BACKSTOP_S, threading.TIMEOUT_MAX)
        faulthandler.dump_traceback_later(delay, exit=True, file=self._backstop)

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[PhaseEntry]:
        """Track the `with` block as the phase `name`. After an exception the phase stays current, for the
        report."""
        outer = self.current
        self.enter(name, step)
        yield self.current
        self.enter(outer.phase, outer.step)

    def wait(self, detail: str) -> None:
        """Track the present phase as a wait for environments until it is called with "".

        detail: which environments. A wait does not increment the phase counter, because
        the replicas of the engine wait at different times. After a wait the phase's time starts again.
        """
        if detail and self.current.phase == "environments":
            self._set(replace(self.current, detail=detail), self.current.seconds)
            return
        now = time.monotonic()
        if detail:
            self._outer = self.current
            limit_s = self._limits.environments
            wait = replace(self._outer, phase="environments", limit_s=limit_s, detail=detail, entered=now)
            self._set(wait)
        else:
            self._set(replace(self._outer, entered=now))

    def begin_step(self, step: int) -> None:
        self.enter("other", step)

    def close(self) -> None:
        """Cancel the backstop."""
        faulthandler.cancel_dump_traceback_later()

    def main_frame(self) -> tuple[str, bool]:
        """Return the main thread's innermost frame outside of libraries, and whether it waits for ranks."""
        innermost = sys._current_frames().get(self._main_thread or 0)
        if innermost is None:
            return "", False
        frame = innermost
        while frame.f_back is not None and _is_library(frame.f_code.co_filename):
            frame = frame.f_back
        waits = any(part in innermost.f_code.co_filename for part in WAITING)
        return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}", waits


def _is_library(path: str) -> bool:
    """Return whether a file belongs to a library or the store; this package may be installed among them."""
    is_library = any(part in path for part in LIBRARIES) and not path.startswith(PACKAGE)
    return is_library or path.endswith(STORE)
