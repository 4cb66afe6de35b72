"""Set-up of a run: its imports, its processes for rewards, its models and its phases."""

import json
from collections.abc import Callable
from functools import partial

from rl.checks.updates import check_specs
from rl.config import wing
from rl.config.needs import learns, needs_reward
from rl.config.run_models import run_models
from rl.config.schema import Config
from rl.data.prompts import end_token_ids
from rl.engines.engines import Engines, build_engines, finish_imports
from rl.engines.inputs import Inputs
from rl.engines.memory import MemorySharing
from rl.engines.rollout_engines import frozen_engines
from rl.faults.agreement import PhaseAgreement, fail_together
from rl.faults.lock import check_lock
from rl.faults.watchdog import Watchdog
from rl.models.sizes import is_tied, num_experts
from rl.phases.draw import Draw
from rl.phases.phases import Phases
from rl.phases.sampler import Sampler
from rl.phases.scorer import Scorer, start_pool
from rl.phases.step_record import StepRecord
from rl.rewards.pool.pool import ScoringPool
from rl.run.samplers import sampler_form
from rl.run_directory.progress import Progress
from rl.run_directory.record import code_hashes
from rl.runtime import start_up, tracing
from rl.runtime.device import Device
from rl.runtime.group_warm_up import limit_collectives, warm_up
from rl.runtime.session import control_group
from rl.stopping.requests import StopRequests
from rl.training.grid import Grid, build_grid


class SetUp:
    """Builds the grid, engines and phases of a run. Collective over the job.

    Args:
        is_finished: whether the run has no step left. If so, engines and scorers are not built.
    """

    def __init__(
        self, config: Config, inputs: Inputs, device: Device, watchdog: Watchdog, *, is_finished: bool
    ):
        self._config, self._inputs, self._device, self._watchdog = config, inputs, device, watchdog
        self._is_finished = is_finished
        if recorder := wing.door(config, "recorder"):
            tracing.control = recorder(config.trace, config.run.dir, device, has_roles=config.roles.is_on)
        self._form = form = sampler_form(config, inputs, is_finished=is_finished)
        has_engine = form.has_engine or bool(frozen_engines(config))
        finish_imports(config, generate=has_engine and not is_finished)
        self._pool = None
        with fail_together():
            form.check()
            if needs_reward(config) and form.trains and not is_finished:
                self._pool = start_pool(config, inputs)
        start_up.mark("rewards")
        form.start(device, watchdog)
        self.trains = form.trains
        """Whether this rank takes the steps of the run; otherwise it runs `generate`."""

    def generate(self, stop: StopRequests) -> int:
        """Do the work of a rank that only generates; return the exit code. Collective over these ranks."""
        return self._form.generate(self._device, self._watchdog, stop)

    def phases(self, progress: Progress, stop: StopRequests) -> Phases:
        """Build grid, engines and phases. Collective over the ranks that train."""
        config, inputs, device = self._config, self._inputs, self._device
        fence = partial(check_lock, self._watchdog.lock)
        step = make_step(config, device, self._watchdog, progress, fence)
        self._engines = engines = build_engines(
            config, inputs, make_grid(config, inputs, device), device, generate=not self._is_finished
        )
        self._form.plan_weights(engines)
        limit_collectives(config.watchdog.limits)
        memory = MemorySharing(config, device, engines)
        sampler = self._form.sampler(step, engines, memory, stop)
        return make_phases(config, inputs, step, engines, memory, sampler, self._pool)

    def close(self) -> None:
        """End the processes and the engines that `phases` has built."""
        if self._pool is not None:
            self._pool.shutdown()
        self._form.close()
        self._engines.close()


def make_phases(
    config: Config,
    inputs: Inputs,
    step: StepRecord,
    engines: Engines,
    memory: MemorySharing,
    sampler: Sampler,
    pool: ScoringPool | None,
) -> Phases:
    """Return the phases of a run. pool: the processes that score samples; None if the run scores none."""
    teachers = {f"teacher {path}": model for path, model in engines.teachers.items()}
    check_specs(config, engines.training | teachers)
    teaching = wing.door(config, "teaching")
    return Phases(
        config,
        step=step,
        engines=engines,
        memory=memory,
        draw=Draw(
            inputs.prompts,
            inputs.prompt_order(),
            seed=None if config.data.curriculum else config.run.seed,
            shuffle=config.data.shuffle,
            weights=config.data.train_weights if learns(config) else (),
        ),
        sampler=sampler,
        scorer=None if pool is None else Scorer(config, inputs, step.device, engines, pool),
        end_ids=frozenset({inputs.tokenizer.eos_token_id} | end_token_ids(config.model.path)) - {None},
        make_teachers=None
        if teaching is None
        else partial(teaching, tokenizer=inputs.tokenizer, others=inputs.teachers.others),
    )


def make_step(
    config: Config, device: Device, watchdog: Watchdog, progress: Progress, fence: Callable[[], None]
) -> StepRecord:
    """Return the step object of a run. fence: see `StepRecord.fence`. Collective over the world."""
    agreement = PhaseAgreement(
        config, json.dumps(code_hashes(config)), control_group(), replica_size=config.rollout.tp
    )
    return StepRecord(device=device, progress=progress, watchdog=watchdog, agreement=agreement, fence=fence)


def make_grid(config: Config, inputs: Inputs, device: Device) -> Grid:
    """Return the grid of the ranks that train, after the first collective of each group that a step uses.

    Collective over the world.
    """
    layout, etp = config.training, config.training.expert_tp
    models = [files.hf for files in inputs.models.values()]
    if (copies := wing.door(config, "copies")) is not None:
        # The ranks of a copy take the place of a tensor parallel group of experts.
        runs = run_models(config)
        etp = copies(config, [(files.hf, bool(runs[name].head)) for name, files in inputs.models.items()])
    grid = build_grid(
        tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, etp=etp, vpp=layout.vpp, seed=config.run.seed
    )
    has_experts = copies is None and any(map(num_experts, models))
    used = grid if copies is None else grid.with_shards()
    warm_up(device, used.step_groups(has_experts=has_experts, ties_embedding=any(map(is_tied, models))))
    start_up.mark("groups")
    return grid
