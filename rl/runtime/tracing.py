"""Spans of time for the timeline of a traced step (`trace`). In every other step a span costs a comparison.

    with tracing.span("refit batch", mib=12):
        ...

A run with `trace.steps` sets `control`, which sets `active` while a step is recorded.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Recorder(Protocol):
    """Records the spans of a step on this rank."""

    timers: Any
    """Megatron's timers, which become spans."""

    def span(self, name: str, args: dict[str, Any]) -> AbstractContextManager: ...

    def profile(self, phase: str) -> AbstractContextManager: ...

    def mark_phase(self, name: str) -> None: ...

    def add_reward(self, worker: int, begin: float) -> None: ...


class Control(Protocol):
    """Decides which steps are recorded."""

    role: str
    """Role of this rank, for the names of its tracks."""

    def begin(self, number: int) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


_NOTHING = nullcontext()

control: Control | None = None
"""None in a run without `trace.steps`."""
active: Recorder | None = None
"""The recorder of the present step, None if it is not traced."""


def begin_step(number: int) -> None:
    """End the recording of the step before, and begin recording step `number` if it is traced."""
    if control is not None:
        control.begin(number)


def end_step() -> None:
    """End the recording of the present step; a thread writes its file."""
    if control is not None:
        control.end()


def span(name: str, **args: Any) -> AbstractContextManager:
    """Record the body as a span of the calling thread. args: numbers or texts that the viewer shows."""
    return _NOTHING if active is None else active.span(name, args)


def profile(phase: str) -> AbstractContextManager:
    """Run torch.profiler in the body, if `trace.torch_profiler` names this phase."""
    return _NOTHING if active is None else active.profile(phase)


def mark_phase(name: str) -> None:
    """Record that the main thread has entered a phase of `rl.faults.phase_tracker`."""
    if active is not None:
        active.mark_phase(name)


def finish() -> None:
    """End the recording of the present step, and wait until its file is written."""
    if control is not None:
        control.end()
        control.close()
