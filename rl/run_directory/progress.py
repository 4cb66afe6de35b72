"""How far a phase is: a bar on a terminal, a plain line now and then in a log file, nothing on the other ranks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol, TextIO

from tqdm import tqdm

LINE_INTERVAL_S = 10.0
"""Least seconds between two lines of one phase where the stream is no terminal (sbatch log, CI)."""


class Counter(Protocol):
    """What `Progress.phase` yields."""

    def update(self, n: int = 1) -> object:
        """Count n more units as done."""


class _Bar(tqdm):
    # tqdm would start a thread that only serves bars with a dynamic `miniters`; a thread of nobody's use in every rank.
    monitor_interval = 0


class _Lines:
    def __init__(self, description: str, total: int | None, unit: str, stream: TextIO):
        self._description, self._total, self._unit, self._stream = description, total, unit, stream
        self._done = 0
        self._start = self._last_line = monotonic()

    def update(self, n: int = 1) -> None:
        self._done += n
        now = monotonic()
        if now - self._last_line >= LINE_INTERVAL_S:
            self._last_line = now
            done = f"{self._done}" if self._total is None else f"{self._done}/{self._total}"
            print(
                f"{self._description} {done} {self._unit}, {now - self._start:.0f} s",
                file=self._stream,
                flush=True,
            )


class _Silent:
    def update(self, n: int = 1) -> None:
        pass


class Progress:
    """Shows the progress of phases on one stream.

    Args:
        enabled: False on all ranks but the first: nothing is written, the interface is the same.
        stream: where to write. Whether it is a terminal decides between bars and lines. None: sys.stderr.
    """

    def __init__(self, enabled: bool, stream: TextIO | None = None):
        self._enabled = enabled
        self._stream = sys.stderr if stream is None else stream
        self._terminal = enabled and self._stream.isatty()

    @contextmanager
    def phase(self, description: str, total: int | None, unit: str) -> Iterator[Counter]:
        """Context manager around a phase. Call `.update(n)` on what it yields as n more units are done.

        On a terminal the bar disappears at the end, also if the phase raises. In a log a phase shorter than
        LINE_INTERVAL_S leaves no trace. `unit` is a plural such as 'samples'; total None: not known.
        """
        if not self._enabled:
            yield _Silent()
        elif not self._terminal:
            yield _Lines(description, total, unit, self._stream)
        else:
            options = dict(
                desc=description, total=total, unit=f" {unit}", leave=False, dynamic_ncols=True, miniters=1
            )
            with _Bar(file=self._stream, **options) as bar:
                yield bar

    def line(self, text: str) -> None:
        """Print a line; a bar in progress moves below it."""
        if not self._enabled:
            return
        if self._terminal:
            _Bar.write(text, file=self._stream)
            self._stream.flush()
        else:
            print(text, file=self._stream, flush=True)
