"""The current step: its number, its metrics, and the actions before and after each of its phases."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist

from rl.faults.agreement import PhaseAgreement
from rl.faults.process import GIB, TRIM_GROWTH, host_bytes_used, resident_bytes, return_free_memory
from rl.faults.watchdog import Watchdog
from rl.phases.performance import slowest_rank, time_per_token, utilisation
from rl.run_directory.progress import Counter as UnitCounter
from rl.run_directory.progress import Progress
from rl.runtime import tracing
from rl.runtime.device import Device


class StepRecord:
    """Number and metrics of the current step. All phases of a run share one object; `begin` resets it."""

    def __init__(
        self,
        *,
        device: Device,
        progress: Progress,
        watchdog: Watchdog,
        agreement: PhaseAgreement,
        fence: Callable[[], None] = lambda: None,
    ):
        self.device, self.progress, self.watchdog, self.agreement = device, progress, watchdog, agreement
        self.fence = fence
        """Raises LockLost if another job has taken over the run; rank 0 calls it before it changes files."""
        self.number = 0
        self.metrics: dict[str, float] = {}
        self.num_tokens = 0
        """Prompt and response tokens of this step's policy updates."""
        self.batch_tokens = (0, 0)
        """Prompt tokens and response tokens of the batch that this step learns from."""
        self.operations: Counter[str] = Counter()
        """Operations of this step's passes on all ranks, by <timing>; timing_s/<timing> is their duration."""
        self.peak_tflops = device.peak_tflops
        """Peak of the device. None if the peak is unknown; then no operations are counted."""
        self.is_committed = False
        """Once true, the step can no longer be aborted and retried: the algorithm has begun to learn."""
        self.abortable_s = 0.0
        """Seconds of this step in which a stop request could have aborted it."""
        self.events = 0
        """Digest of the engine's last event log, which the replica's ranks compare before the next phase."""
        self.after_phase: Callable[[str], None] | None = None
        """Called at the end of each phase with the <timing> of the phase."""
        self._first: int | None = None
        self._resident = 0
        """Resident memory after the last return of freed memory, in bytes."""

    @property
    def is_first_of_start(self) -> bool:
        """Whether this is the first step since the processes started."""
        return self.number == self._first

    def begin(self, number: int) -> None:
        """Begin step `number` with empty metrics. Step 0 is the validation before training."""
        self.number, self.metrics = number, {"training/global_step": number}
        self.num_tokens, self.is_committed, self.abortable_s = 0, False, 0.0
        self.batch_tokens = (0, 0)
        self.operations.clear()
        if self._first is None and number > 0:
            self._first = number
        tracing.begin_step(number)
        self.watchdog.tracker.begin_step(number)
        self.agreement.begin_step()

    @contextmanager
    def phase(self, name: str, *, timing: str, batch: Mapping[str, int] | None = None) -> Iterator[None]:
        """Run the body as the phase `name` of `rl.faults.phase_tracker.PHASES`. Collective over the world.

        The watchdog applies the time limit of the phase. Before the body runs, the ranks check that they have
        the same phase, step and `batch`. The seconds of the body are added to timing_s/<timing>.

        batch: hashes of the parts of the batch, by name of the part.
        """
        with self.watchdog.tracker.phase(name, self.number) as entry:
            with self.timed("agreement"):
                is_cuda = self.device.is_cuda
                peaks = (0, 0)
                if is_cuda:
                    own = self.device.torch
                    peaks = torch.cuda.max_memory_allocated(own), torch.cuda.max_memory_reserved(own)
                memory = (self._trim(), *peaks)
                host, allocated, reserved = self.agreement.check(entry, batch or {}, self.events, memory)
            largest = max(host / GIB, self.metrics.get("perf/host_memory_gib", 0.0))
            self.metrics["perf/host_memory_gib"] = largest
            if is_cuda:
                self.metrics["perf/max_memory_allocated_gb"] = allocated / GIB
                self.metrics["perf/max_memory_reserved_gb"] = reserved / GIB
            with self.timed(timing), tracing.profile(name):
                yield
            if self.after_phase is not None:
                self.after_phase(timing)

    def _trim(self) -> int:
        """Return the resident memory in bytes; if it has grown, then return freed memory to the system."""
        resident = resident_bytes()
        if resident > TRIM_GROWTH * self._resident:
            return_free_memory()
            self._resident = resident_bytes()
        return resident

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds in the body to timing_s/<name>."""
        start = time.perf_counter()
        with tracing.span(name):
            yield
        key = f"timing_s/{name}"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start

    def log_performance(self, *, num_ranks: int) -> None:
        """Log speed and memory of the step, once it has learned.

        num_ranks: number of ranks of the job. With roles, only the ranks that train (the world) compute the
            counted operations.
        """
        metrics = self.metrics
        metrics["perf/total_num_tokens"] = self.num_tokens
        seconds = metrics["perf/time_per_step"] = metrics["timing_s/step"]
        metrics["perf/throughput"] = self.num_tokens / seconds / num_ranks
        metrics["perf/cpu_memory_used_gb"] = host_bytes_used() / GIB
        metrics |= time_per_token(metrics, *self.batch_tokens)
        if self.peak_tflops:
            peak = self.peak_tflops * 1e12 * dist.get_world_size()
            metrics |= utilisation(metrics, self.operations, peak)
        metrics |= slowest_rank(self.agreement.late_s.tolist())

    def bar(self, name: str, total: int) -> AbstractContextManager[UnitCounter]:
        """Return a progress bar over `total` samples, as a context manager."""
        return self.progress.phase(f"step {self.number} {name}", total, "samples")
