"""The progress of a phase on rank 0: a bar on a terminal, lines in a log file."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol, TextIO

from tqdm import tqdm

LINE_INTERVAL_S = 10.0
"""Shortest time between two lines of one phase in a log file, in seconds."""


class Counter(Protocol):
    """The object that `Progress.phase` yields."""

    def update(self, n: int = 1) -> object:
        """Count n more units as done."""


class _Bar(tqdm):
    # Otherwise tqdm starts a thread, which only serves bars with a dynamic `miniters`.
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
    """Shows the progress of phases on one stream: bars on a terminal, else lines.

    Args:
        enabled: False on ranks other than 0, where nothing is written.
        stream: None for sys.stderr.
    """

    def __init__(self, enabled: bool, stream: TextIO | None = None):
        self._enabled = enabled
        self._stream = sys.stderr if stream is None else stream
        self._terminal = enabled and self._stream.isatty()

    @contextmanager
    def phase(self, description: str, total: int | None, unit: str) -> Iterator[Counter]:
        """Show the progress of the body, which calls `.update(n)` after n more units.

        On a terminal the bar disappears at the end, also if the body raises. In a log a phase shorter than
        LINE_INTERVAL_S writes nothing. `unit` is a plural such as 'samples'; `total` is None if it is
        unknown.
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
        """Print a line, above a bar in progress."""
        if not self._enabled:
            return
        if self._terminal:
            _Bar.write(text, file=self._stream)
            self._stream.flush()
        else:
            print(text, file=self._stream, flush=True)
