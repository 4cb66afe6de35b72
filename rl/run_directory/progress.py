"""The progress of a run on rank 0: a live view on a terminal, lines in a log file."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rl.run_directory.view import Phase

LINE_INTERVAL_S = 10.0
"""Shortest time between two lines of one phase in a log file, in seconds."""
DRAW_INTERVAL_S = 0.1
"""Shortest time between two drawings of the view, in seconds."""


def _print(text: str, stream: TextIO) -> None:
    with suppress(OSError):  # if the log's own disk is full, the run goes on without this line
        print(text, file=stream, flush=True)


class Counter(Protocol):
    """The object that `Progress.phase` yields."""

    def update(self, n: int = 1) -> object:
        """Count n more units as done."""


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
            text = f"{self._description} {done} {self._unit}, {now - self._start:.0f} s"
            _print(text, self._stream)


class _Silent:
    def update(self, n: int = 1) -> None:
        pass


class _Screen:
    """The view of the run on a terminal, drawn while a phase is in progress."""

    def __init__(self, name: str, max_steps: int, stream: TextIO):
        from rich.console import Console
        from rich.live import Live

        from rl.run_directory.view import RunView, draw

        self.view, self._draw = RunView(name, max_steps=max_steps), draw
        # Without its thread, because the libraries of this process start other processes.
        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._last = 0.0

    @contextmanager
    def phase(self, phase: "Phase") -> Iterator[Counter]:
        outer, self.view.phase = self.view.phase, phase
        if outer is None:
            self._live.start()
        try:
            self.draw()
            yield _Counted(self, phase)
        finally:
            self.view.phase = outer
            if outer is None:
                self._live.stop()

    def draw(self) -> None:
        self._last = monotonic()
        self._live.update(self._draw(self.view), refresh=True)

    def draw_soon(self) -> None:
        if monotonic() - self._last >= DRAW_INTERVAL_S:
            self.draw()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Counted:
    """Counts the units of a phase on the screen."""

    def __init__(self, screen: _Screen, phase: "Phase"):
        self._screen, self._phase, self._start = screen, phase, monotonic()

    def update(self, n: int = 1) -> None:
        self._phase.done = (self._phase.done or 0) + n
        self._phase.seconds = monotonic() - self._start
        self._screen.draw_soon()


class Progress:
    """Shows the progress of a run on one stream: a view on a terminal, else lines.

    Args:
        enabled: False on ranks other than 0, where nothing is written.
        stream: None for sys.stderr.
        name, max_steps: of the run.
    """

    def __init__(self, enabled: bool, stream: TextIO | None = None, *, name: str = "", max_steps: int = 0):
        self._enabled = enabled
        self._stream = sys.stderr if stream is None else stream
        self._screen = _Screen(name, max_steps, self._stream) if enabled and self._stream.isatty() else None

    @contextmanager
    def phase(self, description: str, total: int | None, unit: str) -> Iterator[Counter]:
        """Show the progress of the body, which calls `.update(n)` after n more units.

        On a terminal the view disappears at the end, also if the body raises. In a log a phase shorter than
        LINE_INTERVAL_S writes nothing. `unit` is a plural such as 'samples'; `total` is None if it is
        unknown.
        """
        if not self._enabled:
            yield _Silent()
        elif self._screen is None:
            yield _Lines(description, total, unit, self._stream)
        else:
            from rl.run_directory.view import Phase

            with self._screen.phase(Phase(description, 0.0, 0, total, unit)) as counter:
                yield counter

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Take the metrics of a step into the view of a terminal."""
        if self._screen is not None:
            self._screen.view.record(step, metrics)

    def line(self, text: str) -> None:
        """Print a line, above a view in progress."""
        if self._screen is not None:
            self._screen.line(text)
        elif self._enabled:
            _print(text, self._stream)
