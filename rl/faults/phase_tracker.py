"""Where the main flow of this rank is: which phase of which step, since when."""

import faulthandler
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rl.config.limits import PhaseLimits

PHASES = ("start_up", "generate", "score", "log_probs", "update", "refit", "save", "other")

BACKSTOP_S = 6.0
"""So long after a phase's limit a thread that needs no interpreter lock dumps the stacks and ends the process. It only comes
to that if native code holds the lock: otherwise the watchdog has ended the process before."""

WAITING = ("/torch/distributed/", "/vllm/distributed/", "/pipeline_parallel/p2p_communication.py")
"""Paths of the innermost frame of a rank that waits for others."""

PACKAGE = str(Path(__file__).resolve().parents[1])
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")


@dataclass(frozen=True)
class Place:
    phase: str
    step: int
    number: int
    """Changes of place so far. Every rank runs the same program, so a rank with a lower number is behind."""
    since: float
    """time.time() at which the main flow came here."""
    entered: float
    """time.monotonic() of the same moment."""
    limit_s: float

    @property
    def seconds(self) -> float:
        """How long the main flow has been here."""
        return time.monotonic() - self.entered

    @property
    def words(self) -> str:
        return words(self.phase, self.step)


def words(phase: str, step: int) -> str:
    """'score of step 3', or 'start-up'."""
    return "start-up" if phase == "start_up" else f"{phase} of step {step}"


class Whereabouts:
    """This rank's place, kept by the main flow and read by the watchdog's thread.

    Args:
        limits: seconds per phase.
        backstop: open file for the stacks of a rank whose interpreter lock is held by native code when a limit is over.
    """

    def __init__(self, limits: PhaseLimits, backstop: TextIO):
        self._limits, self._backstop = limits, backstop
        self._main = threading.main_thread().ident
        self._number = 0
        self._go("start_up", 0)

    def _go(self, phase: str, step: int) -> None:
        self._number += 1
        limit_s = getattr(self._limits, phase)
        # One assignment: the thread must not see a new phase with the time of the old one.
        self.place = Place(phase, step, self._number, time.time(), time.monotonic(), limit_s)
        limit = min(limit_s + BACKSTOP_S, threading.TIMEOUT_MAX)
        faulthandler.dump_traceback_later(limit, exit=True, file=self._backstop)

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[Place]:
        """Within it the main flow is in that phase. After an exception it stays there, so that the report can name it."""
        outer = self.place
        self._go(name, step)
        yield self.place
        self._go(outer.phase, outer.step)

    def begin_step(self, step: int) -> None:
        self._go("other", step)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def frame(self) -> tuple[str, bool]:
        """'file:line function' of the main flow's innermost frame outside of libraries, and whether it waits for other ranks."""
        frame = innermost = sys._current_frames().get(self._main)
        if innermost is None:
            return "", False
        while frame.f_back is not None and _is_library(frame.f_code.co_filename):
            frame = frame.f_back
        waits = any(part in innermost.f_code.co_filename for part in WAITING)
        return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}", waits


def _is_library(path: str) -> bool:
    """Installed, this package is among the libraries, but it is not one."""
    return any(part in path for part in LIBRARIES) and not path.startswith(PACKAGE)
