"""Connects trajectories with environments to the sampler of a run."""

import itertools
from pathlib import Path

from rl.config.schema import Config
from rl.engines.inputs import Inputs
from rl.faults.agreement import fail_together
from rl.features.agents.dialogue import Trajectories, trajectories
from rl.features.agents.replica_environments import Environments, start_environments
from rl.features.agents.stored_log import VersionRecorder
from rl.features.agents.trajectory_dialogues import TrajectoryDialogues
from rl.phases.step_record import StepRecord
from rl.rollout.engine import RolloutEngine
from rl.rollout.sampling import Sampling
from rl.rollout.source import SampleSource
from rl.run.samplers import DialogueForm
from rl.run_directory.event_files import DIRECTORY
from rl.runtime import start_up


class TrajectoryForm(DialogueForm):
    """Samples are trajectories, with environments in processes beside the replica's leader."""

    def __init__(self, config: Config, inputs: Inputs):
        super().__init__(config, inputs)
        self._environments: Environments | None = None
        self._numbers = itertools.count()
        """Counter whose numbers distinguish the logs of one version of the weights."""

    def start(self) -> None:
        inputs = self._inputs
        with fail_together():
            self._environments = start_environments(self._config, inputs.tokenizer, inputs.kept_ids)
        start_up.mark("environments")

    def dialogues(self, step: StepRecord) -> TrajectoryDialogues:
        return TrajectoryDialogues(self._config, step, self._environments)

    def dialogue(self, sampling: Sampling, *, capacity: int, keeps_failed: bool) -> Trajectories:
        options: dict = dict(capacity=capacity, keeps_failed=keeps_failed)
        assert self._environments is not None, "only a replica's leader makes a dialogue"
        return trajectories(self._config, self._environments, sampling, **options)

    def recorder(
        self, source: SampleSource, engine: RolloutEngine, sampling: Sampling
    ) -> VersionRecorder | None:
        config = self._config
        if config.agents.order != "arrival" or config.roles.cache == "keep":
            return None

        def path_of(version: int) -> Path:
            name = f"train.{version + 1}_replica_{engine.replica}.{next(self._numbers)}.events"
            return Path(config.run.dir, DIRECTORY, f"step_{version + 1}", name)

        is_async = engine.config.async_scheduling
        return VersionRecorder(source, engine.weights_version, sampling, path_of, is_async)

    def close(self) -> None:
        if self._environments is not None:
            self._environments.close()
