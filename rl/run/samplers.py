"""The form in which a run's samples are produced, and what that form needs before the engines are built.

The form here generates in turn with the training. Options replace it (`rl.config.wing`): for example, a run
with the section `roles` has `RolesForm`, whose ranks either train or generate.
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
        """Write what is not written yet, after a run of the engine in which all requests have ended."""


class DialogueForm:
    """How the samples of a run proceed: as responses of one turn."""

    def __init__(self, config: Config, inputs: Inputs):
        self._config, self._inputs = config, inputs

    def start(self) -> None:
        """Start what answers the policy on this rank. Collective over the ranks that generate."""

    def dialogues(self, step: StepRecord) -> Dialogues:
        """Return the dialogues of a rank that trains."""
        return Dialogues()

    def dialogue(self, sampling: Sampling, *, capacity: int, keeps_failed: bool) -> Dialogue:
        """Return the dialogue of one call, on a rank that only generates.

        capacity: number of samples that the replica may hold. keeps_failed: whether a sample whose
        environment failed is returned.
        """
        return SingleTurn(sampling, capacity=capacity)

    def recorder(
        self, source: SampleSource, engine: RolloutEngine, sampling: Sampling
    ) -> RecordedSource | None:
        """Return what stores the events of a rank that only generates; None: they are not stored."""
        return None

    def close(self) -> None:
        """End what `start` has started."""


class SamplerForm:
    """The samples are generated in turn with the training. The methods are called in their order.

    Args:
        is_finished: whether the run has no step left.
    """

    trains = True
    """Whether this rank trains; else `generate` is its part."""
    has_engine = True
    """Whether this rank generates with the policy."""

    def __init__(self, config: Config, inputs: Inputs, *, is_finished: bool):
        self._config, self._inputs, self._is_finished = config, inputs, is_finished
        self._dialogue_form: DialogueForm = (wing.door(config, "dialogues") or DialogueForm)(config, inputs)

    def check(self) -> None:
        """Read what replaces samples of this run. Not collective; raises ConfigError."""

    def start(self, device: Device, watchdog: Watchdog) -> None:
        """Start what runs beside the engines. Collective over the job."""
        if self.has_engine and not self._is_finished:
            self._dialogue_form.start()

    def generate(self, device: Device, watchdog: Watchdog, stop: StopRequests) -> int:
        """Generate on a rank that does not train; return the exit code. Collective over those ranks."""
        raise NotImplementedError

    def plan_weights(self, engines: Engines) -> None:
        """Plan how the policy's weights reach engines of other ranks. Collective over the job."""

    def sampler(
        self, step: StepRecord, engines: Engines, memory: MemorySharing, stop: StopRequests
    ) -> Sampler:
        """Return the sampler."""
        return Generation(*self._shared(step, engines, memory, stop), self._dialogue_form.dialogues(step))

    def close(self) -> None:
        """End what runs beside the engines."""
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
