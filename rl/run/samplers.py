"""`SamplerForm`: how a run gets its samples. `rl.run.set_up` calls a form to prepare the run, to make the
`Sampler`, and to clean up.

The form in this file alternates generation and training on the same ranks. Options replace it by other forms
(`rl.config.wing`). For example, a run with the section `roles` has `RolesForm`: a rank trains or generates.
"""

from typing import Protocol

from rl.config import wing
from rl.config.schema import Config
from rl.engines.engines import Engines
from rl.engines.inputs import Inputs
from rl.engines.memory import MemorySharing
from rl.faults.watchdog import Watchdog
from rl.phases.dialogues import Dialogues
from rl.phases.generation import Generation
from rl.phases.sampler import Sampler
from rl.phases.step_record import StepRecord
from rl.rollout.engine import RolloutEngine
from rl.rollout.events import Source
from rl.rollout.sampling import Sampling
from rl.rollout.single_turn import SingleTurn
from rl.rollout.source import Dialogue, SampleSource
from rl.runtime.device import Device
from rl.stopping.requests import StopRequests


class RecordedSource(Source, Protocol):
    """A source whose events are stored, for a later replay."""

    def finish(self) -> None:
        """Write the remaining events. Called after a run of the engine in which all requests have ended."""


class DialogueForm:
    """The form of a run's samples. Here every sample is a response of one turn.

    `Dialogues` makes batches on the ranks that train; `Dialogue` advances samples in one call of the engine.
    """

    def __init__(self, config: Config, inputs: Inputs):
        self._config, self._inputs = config, inputs

    def start(self) -> None:
        """Start the environments' processes on this rank, if any. Collective over the generating ranks."""

    def dialogues(self, step: StepRecord) -> Dialogues:
        """Return the dialogues of a rank that trains."""
        return Dialogues()

    def dialogue(self, sampling: Sampling, *, capacity: int, keeps_failed: bool) -> Dialogue:
        """Return the dialogue of one call, on a rank that only generates.

        capacity: number of samples that the replica may hold. keeps_failed: whether a sample with a failed
        environment is returned.
        """
        return SingleTurn(sampling, capacity=capacity)

    def recorder(
        self, source: SampleSource, engine: RolloutEngine, sampling: Sampling
    ) -> RecordedSource | None:
        """Return the recorder of events of a rank that only generates; None: events are not stored."""
        return None

    def close(self) -> None:
        """End the processes that `start` started."""


class SamplerForm:
    """Generation alternates with training on the same ranks. The methods are called from top to bottom.

    Args:
        is_finished: whether the run has no step left.
    """

    trains = True
    """Whether this rank trains; otherwise it runs `generate`."""
    has_engine = True
    """Whether this rank generates with the policy."""

    def __init__(self, config: Config, inputs: Inputs, *, is_finished: bool):
        self._config, self._inputs, self._is_finished = config, inputs, is_finished
        self._dialogue_form: DialogueForm = (wing.door(config, "dialogues") or DialogueForm)(config, inputs)

    def check(self) -> None:
        """Check the files that the form reads; this form reads none. Not collective; may raise ConfigError.

        For example, the form of run.mode=train_only checks the stored samples.
        """

    def start(self, device: Device, watchdog: Watchdog) -> None:
        """Start processes and connections beside the engines. Collective over the job."""
        if self.has_engine and not self._is_finished:
            self._dialogue_form.start()

    def generate(self, device: Device, watchdog: Watchdog, stop: StopRequests) -> int:
        """Generate on a rank that does not train; return the exit code. Collective over the generating
        ranks."""
        raise NotImplementedError

    def plan_weights(self, engines: Engines) -> None:
        """Plan how the policy's weights reach engines on other ranks. Collective over the job."""

    def sampler(
        self, step: StepRecord, engines: Engines, memory: MemorySharing, stop: StopRequests
    ) -> Sampler:
        """Return the sampler."""
        return Generation(*self._shared(step, engines, memory, stop), self._dialogue_form.dialogues(step))

    def close(self) -> None:
        """End the processes and connections that `start` started."""
        self._dialogue_form.close()

    def _shared(
        self, step: StepRecord, engines: Engines, memory: MemorySharing, stop: StopRequests
    ) -> tuple[Config, StepRecord, Engines, MemorySharing, StopRequests | None]:
        """Return the first arguments of a `Generation`."""
        redo = stop if self._config.run.on_stop_in_generation == "redo" else None
        return self._config, step, engines, memory, redo


def sampler_form(config: Config, inputs: Inputs, *, is_finished: bool) -> SamplerForm:
    """Return the form of a run. Arguments as for `SamplerForm`."""
    return (wing.door(config, "sampler") or SamplerForm)(config, inputs, is_finished=is_finished)
