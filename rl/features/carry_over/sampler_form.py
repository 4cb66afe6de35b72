"""The form of sampling of a run with carry-over: unfinished samples continue in the next step."""

from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.features.carry_over.carry_over import CarryOver
from rl.phases.step_record import StepRecord
from rl.run.samplers import SamplerForm
from rl.stopping.requests import StopRequests


class CarryOverForm(SamplerForm):
    """Makes the sampler that carries unfinished samples over to the next step."""

    def sampler(
        self, step: StepRecord, engines: Engines, memory: MemorySharing, stop: StopRequests
    ) -> CarryOver:
        shared = self._shared(step, engines, memory, stop)
        dialogues = self._dialogue_form.dialogues(step)
        return CarryOver(*shared, dialogues, prompts=self._inputs.prompts)
