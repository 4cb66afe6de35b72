"""The form of sampling of a run with roles: some ranks train while others generate."""

import torch.distributed as dist

from rl.config.role_checks import role_ranks
from rl.config.schema import Config
from rl.engines.engines import Engines
from rl.engines.inputs import Inputs
from rl.engines.memory import MemorySharing
from rl.faults.watchdog import Watchdog
from rl.features.roles.generators import Generators, enter_role
from rl.features.roles.trainer_side import GenerationByRoles
from rl.phases.step_record import StepRecord
from rl.run.samplers import SamplerForm
from rl.runtime.device import Device
from rl.stopping.requests import StopRequests


class RolesForm(SamplerForm):
    """Makes each rank a trainer, which asks other ranks for samples, or a generator, which answers."""

    def __init__(self, config: Config, inputs: Inputs, *, is_finished: bool):
        super().__init__(config, inputs, is_finished=is_finished)
        self.trains = dist.get_rank() in role_ranks(config, dist.get_world_size())[0]
        self.has_engine = not self.trains

    def start(self, device: Device, watchdog: Watchdog) -> None:
        self._link = enter_role(self._config, device, watchdog)
        super().start(device, watchdog)

    def generate(self, device: Device, watchdog: Watchdog, stop: StopRequests) -> int:
        ranks = self._config, self._inputs, device, watchdog, self._link, stop
        generating = Generators(*ranks, self._dialogue_form)
        code = 0 if self._is_finished else generating.run()
        self.close()
        return code

    def plan_weights(self, engines: Engines) -> None:
        if not self._is_finished:
            hf = self._inputs.models["policy"].hf
            self._link.plan_weights(self._config, hf, trainer=engines.policy)

    def sampler(
        self, step: StepRecord, engines: Engines, memory: MemorySharing, stop: StopRequests
    ) -> GenerationByRoles:
        config, *_, redo = self._shared(step, engines, memory, stop)
        redo = None if config.rollout.deterministic else redo
        options: dict = dict(link=self._link, dialogues=self._dialogue_form.dialogues(step))
        return GenerationByRoles(config, step, engines.policy, memory, redo, **options)
