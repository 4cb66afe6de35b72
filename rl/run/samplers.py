"""The form in which a run's samples are produced, and what that form needs before the engines are built.

This is the only file that names all forms (`rl.phases.sampler.Sampler`); each is imported only by its runs.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from rl.config.role_checks import role_ranks
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.inputs import Inputs
from rl.engines.memory import MemorySharing
from rl.faults.agreement import fail_together
from rl.faults.watchdog import Watchdog
from rl.phases.dialogues import Dialogues
from rl.phases.generation import Generation
from rl.phases.phases import Phases
from rl.phases.sampler import Sampler
from rl.phases.step_record import StepRecord
from rl.rollout.source import Dialogue
from rl.runtime import start_up
from rl.runtime.device import Device
from rl.stopping.requests import StopRequests

if TYPE_CHECKING:
    from rl.agents.replica_environments import Environments
    from rl.refit.link import Link
    from rl.run.stored_batches import StoredBatches


class StoredSampler(Generation):
    """Generation of a run whose training batches are those of another run (`run.mode=train_only`)."""

    def __init__(self, *args, stored: "StoredBatches"):
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


class SamplerSetUp:
    """Sets up the sampler of a run. The methods are called in their order.

    Args:
        is_finished: whether the run has no step left.
    """

    def __init__(self, config: Config, inputs: Inputs, *, is_finished: bool):
        self._config, self._inputs, self._is_finished = config, inputs, is_finished
        self.trains = True
        """Whether this rank trains, and not only generates."""
        if config.roles.is_on:
            self.trains = dist.get_rank() in role_ranks(config, dist.get_world_size())[0]
        self.has_engine = not (config.roles.is_on and self.trains)
        """Whether this rank generates with the policy."""
        self._stored: StoredBatches | None = None
        self._link: Link | None = None
        self._environments: Environments | None = None

    def check(self) -> None:
        """Read what replaces samples of this run. Not collective; raises ConfigError."""
        if self._config.run.mode == "train_only":
            from rl.run.stored_batches import StoredBatches

            self._stored = StoredBatches(self._config)

    def start(self, device: Device, watchdog: Watchdog) -> None:
        """Start what runs beside the engines. Collective over the job."""
        config = self._config
        if config.roles.is_on:
            from rl.run import generators

            self._link = generators.enter_role(config, device, watchdog)
        if config.agents.is_on and self.has_engine and self._stored is None and not self._is_finished:
            from rl.agents.replica_environments import start_environments

            with fail_together():
                self._environments = start_environments(config, self._inputs.tokenizer, self._inputs.kept_ids)
            start_up.mark("environments")

    def generate(self, device: Device, watchdog: Watchdog, stop: StopRequests) -> int:
        """Generate on a rank that does not train; return the exit code. Collective over those ranks."""
        from rl.run import generators

        assert self._link is not None
        config, recorder_of = self._config, None
        dialogue_of: Callable[..., Dialogue] = generators.single_turns
        if config.agents.is_on:
            from rl.agents.dialogue import trajectories
            from rl.rollout.stored_log import recorder

            dialogue_of = partial(trajectories, config, self._environments)
            if config.agents.order == "arrival" and config.roles.cache != "keep":
                recorder_of = partial(recorder, config.run.dir, itertools.count())
        ranks = config, self._inputs, device, watchdog, self._link, stop
        generating = generators.Generators(*ranks, dialogue_of, recorder_of)
        code = 0 if self._is_finished else generating.run()
        self.close()
        return code

    def plan_weights(self, engines: Engines) -> None:
        """Plan how the policy's weights reach engines of other ranks. Collective over the job."""
        if self._link is not None and not self._is_finished:
            hf = self._inputs.models["policy"].hf
            self._link.plan_weights(self._config, hf, trainer=engines.policy)

    def sampler(
        self, step: StepRecord, engines: Engines, memory: MemorySharing, stop: StopRequests
    ) -> Sampler:
        """Return the sampler."""
        config = self._config
        redo = stop if config.run.on_stop_in_generation == "redo" else None
        dialogues = Dialogues()
        if config.agents.is_on and self._stored is None:
            from rl.phases.trajectories import TrajectoryDialogues

            dialogues = TrajectoryDialogues(config, step, self._environments)
        if self._link is not None:
            from rl.phases.generation_by_roles import GenerationByRoles

            redo = None if config.rollout.deterministic else redo
            options: dict = dict(link=self._link, dialogues=dialogues)
            return GenerationByRoles(config, step, engines.policy, memory, redo, **options)
        if self._stored is not None:
            return StoredSampler(config, step, engines, memory, redo, stored=self._stored)
        if config.rollout.carry_over:
            from rl.phases.carry_over import CarryOver

            prompts = self._inputs.prompts
            return CarryOver(config, step, engines, memory, redo, dialogues, prompts=prompts)
        return Generation(config, step, engines, memory, redo, dialogues)

    def close(self) -> None:
        """End what runs beside the engines."""
        if self._environments is not None:
            self._environments.close()
