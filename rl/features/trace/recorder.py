"""The recorder of a traced step: spans of this rank, the clock's offset from rank 0, and the profilers.

Each rank writes `<run.dir>/trace/step_<step>_rank_<rank>.json` in a thread; `lockstep trace` merges the files
of a step into one trace. Ranks communicate only to compare their clocks, before a step is recorded.
"""

import json
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl.config.options import ConfigError
from rl.config.trace import Trace
from rl.runtime import tracing
from rl.runtime.device import Device
from rl.runtime.session import job

log = logging.getLogger(__name__)

DIRECTORY = "trace"
ROUND_TRIPS = 8
"""Round trips per rank when clocks are compared; the fastest one counts."""
MAX_ALLOCATIONS = 1_000_000
"""Allocations and frees that a memory snapshot keeps, the last ones."""

now = time.monotonic_ns


def compare_clocks(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the offset of rank 0's clock from this rank's, and its largest error, both in nanoseconds.

    Rank 0's time is this rank's plus the offset. Each rank asks rank 0 for its time, as NTP does: with the
    times t0 (sent), t1 (received), t2 (answered) and t3 (received), the offset is
    ((t1 - t0) + (t2 - t3)) / 2, with an error of at most half of the time on the way, which is
    (t3 - t0) - (t2 - t1). Collective over the group.
    """
    times = torch.zeros(2, dtype=torch.int64)
    if group.rank() == 0:
        for rank in range(1, group.size()):
            for _ in range(ROUND_TRIPS):
                dist.recv(times, group=group, group_src=rank)
                received = now()
                times[0], times[1] = received, now()
                dist.send(times, group=group, group_dst=rank)
        return 0, 0
    found = []
    for _ in range(ROUND_TRIPS):
        t0 = now()
        dist.send(times, group=group, group_dst=0)
        dist.recv(times, group=group, group_src=0)
        t3, (t1, t2) = now(), times.tolist()
        found.append((((t3 - t0) - (t2 - t1)) // 2 + 1, ((t1 - t0) + (t2 - t3)) // 2))
    error, offset = min(found)
    return offset, error


class Tracing:
    """The steps of this rank that are recorded, and the directory of their records.

    Clocks are compared at each traced step; with `roles` only once, when this object is made, because the
    roles are in different steps. The constructor is then collective over the job, and so is `begin`
    otherwise.

    Raises ConfigError, identical on every rank, for ranks that the job does not have and for keys that need a
    GPU.
    """

    def __init__(self, trace: Trace, run_dir: str, device: Device, *, has_roles: bool):
        self._trace, self._device, self._has_roles = trace, device, has_roles
        self._directory = Path(run_dir, DIRECTORY)
        for name in ("memory_snapshot", "nvtx"):
            if getattr(trace, name) and not device.is_cuda:
                raise ConfigError(f"trace.{name}=true needs a GPU, and this run has none; leave it out.")
        if max(trace.ranks, default=0) >= job().world_size:
            raise ConfigError(
                f"trace.ranks holds {max(trace.ranks)}, but the job has {job().world_size} ranks; ranks are "
                f"at most {job().world_size - 1}."
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        self._clock = compare_clocks(job().group) if has_roles else (0, 0)
        self._step: int | None = None
        self._writer: threading.Thread | None = None
        self.role = ""
        """Role and replica of this rank, for the viewer; "" without roles."""

    def begin(self, number: int) -> None:
        """Begin to record step `number` if it is traced, else nothing. Ends the recording of another step."""
        if number == self._step:
            return
        self.end()
        self._step = number
        if number in self._trace.steps:
            if not self._has_roles:
                self._clock = compare_clocks(job().group)
            path = self._directory / f"step_{number:06d}_rank_{job().rank:05d}"
            tracing.active = SpanRecorder(path, number, self._trace, self._device, self._clock, self.role)

    def end(self) -> None:
        """End the recording and write it in a thread."""
        recorder, tracing.active, self._step = tracing.active, None, None
        if recorder is not None:
            assert isinstance(recorder, SpanRecorder)
            self.close()
            events = recorder.stop()
            self._writer = threading.Thread(target=recorder.write, args=(events,), name="trace")
            self._writer.start()

    def close(self) -> None:
        """Wait until the last recording is written."""
        if self._writer is not None:
            self._writer.join()


class SpanRecorder:
    """The spans of one step on this rank.

    Args:
        path: path of the files without the extension.
        clock: see `compare_clocks`.
    """

    def __init__(
        self, path: Path, step: int, trace: Trace, device: Device, clock: tuple[int, int], role: str
    ):
        self._path, self._step, self._trace, self._device = path, step, trace, device
        self._clock, self._role = clock, role
        self.is_chosen = job().rank in trace.ranks
        """Whether the profilers record this rank."""
        self._events: list[tuple[str, str, int, int, dict]] = []
        """Track, name, begin and end in nanoseconds, numbers to show."""
        self._open: dict[int, _Span] = {}
        self._phase: tuple[str, int] | None = None
        self._marks_ranges = trace.nvtx and self.is_chosen
        self._records_memory = trace.memory_snapshot and self.is_chosen
        self.timers = _MegatronTimers(self)
        self._on_device: list[tuple[str, Any, Any, dict]] = []
        """Name, begin and end as events of the GPU, numbers to show."""
        self._origin: Any = None
        self._profiles = 0
        if device.is_cuda:
            self._begin_on_cuda()
        self._whole_step = self.profile("step")
        self._whole_step.__enter__()
        self._began = now()

    def _begin_on_cuda(self) -> None:
        if self._records_memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
        if self._marks_ranges:
            torch.cuda.profiler.start()
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._origin_time = now()

    def span(self, name: str, args: dict[str, Any]) -> "_Span":
        return _Span(self, name, args)

    def add(self, track: str, name: str, begin: int, end: int, args: dict[str, Any]) -> None:
        """Add a span with known times, from time.monotonic_ns()."""
        self._events.append((track, name, begin, end, args))

    def add_reward(self, worker: int, begin: float) -> None:
        """Add a sample that the process `worker` has scored since `begin`, of time.monotonic()."""
        self.add(f"reward worker {worker}", "score a sample", int(begin * 1e9), now(), {})

    def mark_phase(self, name: str) -> None:
        at = now()
        if self._phase is not None:
            self.add("phase", *self._phase, at, {})
        self._phase = (name, at)

    @contextmanager
    def profile(self, phase: str) -> Iterator[None]:
        """Run torch.profiler in the body, if `trace.torch_profiler` names this phase."""
        if not self.is_chosen or phase not in self._trace.torch_profiler:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            yield
        self._profiles += 1
        profiler.export_chrome_trace(f"{self._path}.{phase}_{self._profiles}.pt.trace.json")

    def device_event(self) -> Any:
        """Return an event that the GPU has recorded at this place of its queue; None on CPU."""
        if self._origin is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_on_device(self, name: str, begin: Any, args: dict[str, Any]) -> None:
        """Add the work that the GPU's queue has received since the event `begin`."""
        if begin is not None:
            self._on_device.append((name, begin, self.device_event(), args))

    def stop(self) -> list[tuple[str, str, int, int, dict]]:
        """End the recording; return all events."""
        self._whole_step.__exit__(None, None, None)
        self.mark_phase("")
        end = now()
        for open_span in list(self._open.values()):  # of threads that still work
            self.add(open_span.track, open_span.name, open_span.begin, end, {**open_span.args, "ended": "no"})
        if self._origin is not None:
            self._end_on_cuda()
        return self._events

    def _end_on_cuda(self) -> None:
        self._device.synchronize()
        for name, begin, end, args in self._on_device:
            first, last = (
                self._origin_time + int(self._origin.elapsed_time(event) * 1e6) for event in (begin, end)
            )
            self.add("GPU", name, first, last, args)
        if self._marks_ranges:
            torch.cuda.profiler.stop()
        if self._records_memory:
            torch.cuda.memory._dump_snapshot(f"{self._path}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, events: list[tuple[str, str, int, int, dict]]) -> None:
        """Write the file of this rank; it is complete or missing."""
        offset, error = self._clock
        record = {
            "step": self._step,
            "rank": job().rank,
            "host": platform.node(),
            "role": self._role,
            "clock_offset_ns": offset,
            "clock_error_ns": error,
            "unix_minus_clock_ns": time.time_ns() - now(),
            "began_ns": self._began,
            "events": events,
        }
        partial, text = Path(f"{self._path}.partial"), json.dumps(record)
        try:
            partial.write_text(text)
            os.replace(partial, f"{self._path}.json")
        except OSError as error:  # for example a full disk, which must not end the run
            problem = f"{len(text)} bytes, is not written and is missing ({error.strerror})"
            log.error("warning: %s.json, %s", self._path, problem)
            partial.unlink(missing_ok=True)

    def enter(self, span: "_Span") -> None:
        self._open[id(span)] = span
        if self._marks_ranges and span.track == "main":
            torch.cuda.nvtx.range_push(span.name)

    def leave(self, span: "_Span") -> None:
        del self._open[id(span)]
        if self._marks_ranges and span.track == "main":
            torch.cuda.nvtx.range_pop()
        self._events.append((span.track, span.name, span.begin, now(), span.args))


class _Span:
    __slots__ = ("recorder", "name", "args", "track", "begin")

    def __init__(self, recorder: SpanRecorder, name: str, args: dict[str, Any]):
        self.recorder, self.name, self.args = recorder, name, args
        thread = threading.current_thread()
        self.track = "main" if thread is threading.main_thread() else thread.name

    def __enter__(self) -> None:
        self.begin = now()
        self.recorder.enter(self)

    def __exit__(self, *exception: object) -> None:
        self.recorder.leave(self)


class _MegatronTimers:
    """Megatron's timers (`config.timers`): their intervals become spans of the host and of the GPU."""

    def __init__(self, recorder: SpanRecorder):
        self._recorder = recorder
        self._running: dict[str, tuple[_Span, Any]] = {}
        self.micro_batch: dict[str, Any] = {}
        """Numbers shown with the forward pass that is running."""

    def __call__(self, name: str, log_level: int = 0) -> "_MegatronTimers":
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        span = self._recorder.span(self._name, {})
        self._running[self._name] = (span, self._recorder.device_event())
        span.__enter__()

    def stop(self, barrier: bool = False) -> None:
        span, begin = self._running.pop(self._name)
        if self._name == "forward-compute":
            span.args, self.micro_batch = self.micro_batch, {}
        span.__exit__()
        self._recorder.add_on_device(self._name, begin, span.args)
