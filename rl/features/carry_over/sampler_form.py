"""Carry-over as a form of sampling: unfinished samples of a generation continue in the next step."""

from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.features.carry_over.carry_over import CarryOver
from rl.phases.step_record import StepRecord
from rl.run.samplers import SamplerForm
from rl.stopping.requests import StopRequests


class CarryOverForm(SamplerForm):
    """Unfinished samples are carried over to the next step."""

    def sampler(
        self, step: StepRecord, engines: Engines, memory: MemorySharing, stop: StopRequests
    ) -> CarryOver:
        shared = self._shared(step, engines, memory, stop)
        dialogues = self._dialogue_form.dialogues(step)
        return CarryOver(*shared, dialogues, prompts=self._inputs.prompts)
