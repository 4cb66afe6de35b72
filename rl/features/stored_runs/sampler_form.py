"""Stored samples of another run as a form of sampling (`run.mode=train_only`)."""

from collections.abc import Callable
from typing import Any

from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.faults.agreement import fail_together
from rl.faults.watchdog import Watchdog
from rl.features.stored_runs.batches import StoredBatches
from rl.phases.generation import Generation
from rl.phases.phases import Phases
from rl.phases.step_record import StepRecord
from rl.run.samplers import SamplerForm
from rl.runtime.device import Device
from rl.stopping.requests import StopRequests


class StoredSampler(Generation):
    """Generation of a run that takes its training batches from another run."""

    def __init__(self, *args: Any, stored: StoredBatches):
        super().__init__(*args)
        self._stored = stored

    def collect(self, phases: Phases, collect: Callable[[Phases], Batch]) -> Batch:
        with fail_together():
            batch = self._stored.batch(self._step.number)
        if len(batch):
            phases.log_generated(batch)
        return batch

    def check(self, batch: Batch) -> None:
        """Accept tokens of every age: the other run's policy sampled them."""


class StoredForm(SamplerForm):
    """Batches are read, and no environment starts."""

    def check(self) -> None:
        self._stored = StoredBatches(self._config)

    def start(self, device: Device, watchdog: Watchdog) -> None:
        pass

    def sampler(
        self, step: StepRecord, engines: Engines, memory: MemorySharing, stop: StopRequests
    ) -> StoredSampler:
        return StoredSampler(*self._shared(step, engines, memory, stop), stored=self._stored)
