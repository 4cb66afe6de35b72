"""The run: set-up, then steps of collect and learn, with validation, checkpoints and the log between them."""

import copy
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch.distributed as dist

from rl import algorithms
from rl.checkpoint.hf import export_hf
from rl.checkpoint.peft import export_peft
from rl.checkpoint.store import CheckpointStore, Saved
from rl.checks.staleness import check_staleness
from rl.config.declarations import shipped
from rl.config.role_checks import role_ranks
from rl.config.schema import Config, learns_from_samples, needs_reward
from rl.data.batch import Batch
from rl.data.prompts import end_token_ids, num_shared
from rl.engines.engines import build_engines, finish_imports
from rl.engines.inputs import Inputs
from rl.faults.agreement import PhaseAgreement, fail_together
from rl.faults.lock import check_lock
from rl.faults.watchdog import Watchdog
from rl.phases.phases import Phases
from rl.phases.scorer import Scorer, start_pool
from rl.phases.step import Step
from rl.run.checkpoints import RunCheckpoints, find_checkpoint
from rl.run.validation import validate
from rl.run_directory import consumed
from rl.run_directory.metric_log import MetricLog, keep_lines_up_to, step_line
from rl.run_directory.progress import Progress
from rl.run_directory.record import code_hashes, record_run
from rl.run_directory.rollouts import remove_after
from rl.run_directory.status import Status
from rl.run_directory.trackers import followers
from rl.runtime import start_up, tracing
from rl.runtime.device import Device
from rl.runtime.group_warm_up import limit_collectives, warm_up
from rl.runtime.session import control_group, job
from rl.stopping.requests import STOPPED_EXIT, StepAborted, StopDecision, StopRequests
from rl.training.grid import build_grid

if TYPE_CHECKING:
    from rl.run.rollouts import RolloutWriter, StoredBatches


def run(config: Config, inputs: Inputs, device: Device, watchdog: Watchdog) -> int:
    """Run from the newest checkpoint, or from step 0, until the end or a stop. Collective over the world.

    Returns the exit code of the process: 0, or STOPPED_EXIT if the run is to be continued. Raises
    ConfigError, identical on every rank, for checkpoints in run.dir from which this run must not or cannot
    continue.
    """
    start_up.mark("Megatron")  # imported by this module
    with fail_together():
        algorithm = algorithms.load(config.algorithm)  # a user's file may raise anything
    leads = dist.get_rank() == 0
    progress = Progress(leads, name=config.run.name, max_steps=config.run.max_steps)
    status = watchdog.status
    stop = StopRequests(config.run.dir, max_time=config.run.max_time)
    ranks = f"{dist.get_world_size()} rank{'s' if dist.get_world_size() > 1 else ''}"
    progress.line(f"{config.run.name}: {config.algorithm}, {ranks}, {len(inputs.prompts)} prompts")
    store = CheckpointStore(config, fence=partial(check_lock, watchdog.lock))
    newest, named = find_checkpoint(config, store)
    is_finished = is_complete(config, newest)
    if newest is not None and is_finished:
        progress.line(f"already at step {newest.step} of {config.run.max_steps}: nothing to train")
        if not config.checkpoint.export_hf:
            status.write(state="finished", step=newest.step, checkpoint_step=newest.step)
            return 0

    if config.trace.steps:
        from rl.runtime.trace_recorder import Tracing

        tracing.control = Tracing(config.trace, config.run.dir, device, has_roles=config.roles.is_on)
    trains = generates = True
    if config.roles.is_on:
        trains = dist.get_rank() in role_ranks(config, dist.get_world_size())[0]
        generates = not trains
    finish_imports(config, generate=generates and not is_finished)
    pool = stored = None
    with fail_together():
        if config.run.mode == "train_only":
            from rl.run.rollouts import StoredBatches

            stored = StoredBatches(config)
        if needs_reward(config) and trains and not is_finished:
            pool = start_pool(config, inputs)
    start_up.mark("rewards")
    link = None
    if config.roles.is_on:
        from rl.run import generators

        link = generators.enter_role(config, device, watchdog)
        stop = StopRequests(config.run.dir, max_time=config.run.max_time, job=job())
        if generates:
            generating = generators.Generators(config, inputs, device, watchdog, link, stop)
            return 0 if is_finished else generating.run()
    uses_agents = config.agents.is_on and stored is None
    agents = _start_environments(config, inputs) if uses_agents and not is_finished else None
    phases = _build(
        config, inputs, device, watchdog, progress, stop, pool, agents, link, generate=not is_finished
    )
    found = newest, named
    asked, code = take_steps(config, algorithm, inputs, phases, status, stop, store, found, stored=stored)
    for resource in (pool, agents):
        if resource is not None:
            resource.close()
    phases.engines.close()
    return note_end(status, asked, code)


def take_steps(
    config: Config,
    algorithm: ModuleType,
    inputs: Inputs,
    phases: Phases,
    status: Status,
    stop: StopRequests,
    store: CheckpointStore,
    found: tuple[Saved | None, Saved | None],
    *,
    stored: "StoredBatches | None" = None,
) -> tuple[StopDecision | None, int]:
    """Continue from the checkpoint, take the steps up to run.max_steps, and export the policy.

    Returns the request that stopped the run before run.max_steps, or None, and the exit code of a run that
    was not stopped. Collective over the world.

    found: result of `find_checkpoint`. stored: batches that replace the generated ones.
    """
    leads, progress = dist.get_rank() == 0, phases.step.progress
    newest, named = found
    is_finished = is_complete(config, newest)
    checkpoints = RunCheckpoints(config, store, phases, status)
    last_step, metrics = checkpoints.resume(newest, named)
    start_up.mark("checkpoint")
    status.write(step=last_step, checkpoint_step=last_step)
    asked, code = None, 0
    if not is_finished:
        log, rollouts = None, None
        if leads:
            fence = phases.step.fence
            log = _open_log(config, last_step, metrics, fence, resumes=newest is not None)
            rollouts = _open_rollouts(config, inputs, fence)
        resumed = f", resuming after step {last_step}" if last_step else ""
        start_up.mark("record")
        progress.line(f"ready in {start_up.summary()}, run directory {config.run.dir}{resumed}")
        if leads:
            _warn_of_shared_prompts(inputs, progress)
        kind = Training
        if config.run.mode == "check":
            from rl.run.first_step import FirstStep as kind
        training = kind(
            config,
            algorithm,
            inputs,
            phases,
            checkpoints,
            status,
            log,
            stop,
            rollouts=rollouts,
            stored=stored,
        )
        asked = training.run(last_step, metrics)
        code = training.exit_code
        checkpoints.close()
        if phases.split is not None:
            phases.split.end(0 if asked is None or asked.by_hand else STOPPED_EXIT)
        for file in (log, rollouts):
            if file is not None:
                file.close()
    if asked is None and config.checkpoint.export_hf:
        _export(config, phases, step=max(last_step, config.run.max_steps))
    return asked, code


def is_complete(config: Config, newest: Saved | None) -> bool:
    """Return whether the newest checkpoint is that of the last step."""
    resumes = config.checkpoint.resume != "never"
    return newest is not None and resumes and newest.step >= config.run.max_steps


def note_end(status: Status, asked: StopDecision | None, code: int = 0) -> int:
    """Write the end of a run into its status; return the exit code. asked, code: see `take_steps`."""
    if asked is None:
        status.write(state="finished")
        return code
    status.write(state="stopped", reason=asked.reason)
    return 0 if asked.by_hand else STOPPED_EXIT


def _build(
    config: Config,
    inputs: Inputs,
    device: Device,
    watchdog: Watchdog,
    progress: Progress,
    stop: StopRequests,
    pool,
    agents,
    link,
    *,
    generate: bool,
) -> Phases:
    """Build grid, engines and phases. Collective over the ranks that train.

    pool, agents and link are None if the run does not use them. generate: whether to build a rollout engine.
    """
    agreement = PhaseAgreement(
        config, json.dumps(code_hashes(config)), control_group(), replica_size=config.rollout.tp
    )
    layout = config.training
    grid = build_grid(tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=layout.expert_tp, seed=config.run.seed)
    warm_up(device)
    start_up.mark("groups")
    engines = build_engines(config, inputs, grid, device, generate=generate)
    if link is not None and generate:
        link.plan_weights(config, inputs.models["policy"].hf, trainer=engines.policy)
    limit_collectives(config.watchdog.limits)
    return Phases(
        config,
        step=Step(
            device=device,
            progress=progress,
            watchdog=watchdog,
            agreement=agreement,
            fence=partial(check_lock, watchdog.lock),
        ),
        engines=engines,
        prompts=inputs.prompts,
        sampler=inputs.sampler(),
        scorer=None if pool is None else Scorer(config, inputs, device, engines, pool),
        end_ids=end_ids(config, inputs),
        stop=stop,
        agents=agents,
        link=link,
        tokenizer=inputs.tokenizer,
    )


def end_ids(config: Config, inputs: Inputs) -> frozenset[int]:
    """Return the ids of the model's tokens that end a response."""
    return frozenset({inputs.tokenizer.eos_token_id} | end_token_ids(config.model.path)) - {None}


def _warn_of_shared_prompts(inputs: Inputs, progress: Progress) -> None:
    """Print a warning if training and validation data have prompts in common."""
    if shared := num_shared(inputs.prompts, inputs.held_out):
        progress.line(
            f"warning: data check: {shared} of {len(inputs.held_out)} prompts of data.val are in "
            "data.train too, so validation does not measure what the policy generalises."
        )


def _start_environments(config: Config, inputs: Inputs):
    """Return the environments of a run with the section `agents`. Collective over the world."""
    from rl.agents.rollouts import AgentRollouts

    with fail_together():
        agents = AgentRollouts(config, inputs.tokenizer)
    start_up.mark("environments")
    return agents


def _export(config: Config, phases: Phases, *, step: int) -> None:
    """Write the policy as a Hugging Face checkpoint, and its adapters. Collective over the world."""
    policy, target = phases.engines.policy, str(Path(config.run.dir, "hf"))
    fence = phases.step.fence
    with phases.saving():
        export_hf(policy, config.model.path, target, fence=fence)
    phases.step.progress.line(f"wrote {target}, a Hugging Face checkpoint of step {step}")
    if config.adapter.is_on:
        target = str(Path(config.run.dir, "adapter"))
        with phases.saving():
            export_peft(policy, config.model.path, target, fence=fence)
        phases.step.progress.line(f"wrote {target}, the adapters of step {step} in the format of peft")


def _open_log(
    config: Config, last_step: int, metrics: dict[str, float], fence: Callable[[], None], *, resumes: bool
) -> MetricLog:
    """Open the metric log after `last_step` and record what runs. Called on rank 0.

    metrics: metrics of `last_step`, from the checkpoint. fence: that of the step.
    """
    fence()
    resume_step = last_step or None
    shown = [] if config.run.mode == "check" else followers(config, fence)
    log = MetricLog(config.run.dir, resume_step=resume_step, followers=shown)
    if resumes and last_step > log.last_step:  # the run was killed after the checkpoint, before this line
        log.write(last_step, metrics)
    if config.rollout.carry_over or config.roles.is_on:
        keep_lines_up_to(Path(config.run.dir, consumed.FILE_NAME), resume_step)
    remove_after(config.run.dir, last_step)
    if config.agents.is_on:
        from rl.rollout import stored_log

        stored_log.remove_after(config.run.dir, last_step)
    record_run(config, last_step, world_size=job().world_size, start_up_s=start_up.parts)
    return log


def _open_rollouts(config: Config, inputs: Inputs, fence: Callable[[], None]) -> "RolloutWriter | None":
    """Return the writer of `logging.rollouts`, or None if nothing is stored.

    Called on rank 0. A batch of data, or of stored rollouts, is not stored.
    """
    is_generated = learns_from_samples(config) and config.run.mode != "train_only"
    if config.logging.rollouts == "none" or not is_generated:
        return None
    from rl.run.rollouts import RolloutWriter

    return RolloutWriter(config, inputs.tokenizer, fence=fence)


class Training:
    """The steps of a run. Methods are collective over the world.

    This class owns the order of `collect` and `learn`. A step collects and then learns in every form; with
    carry-over and roles, part of what it collects was generated earlier (docs/asynchrony.md).
    """

    exit_code = 0
    """Exit code of a run that was not stopped."""

    def __init__(
        self,
        config: Config,
        algorithm: ModuleType,
        inputs: Inputs,
        phases: Phases,
        checkpoints: RunCheckpoints,
        status: Status,
        log: MetricLog | None,
        stop: StopRequests,
        *,
        rollouts: "RolloutWriter | None" = None,
        stored: "StoredBatches | None" = None,
    ):
        self._config, self._algorithm, self._phases = config, algorithm, phases
        self._inputs, self._held_out = inputs, inputs.held_out
        self._checkpoints, self._status, self._log, self._stop = checkpoints, status, log, stop
        self._rollouts, self._stored = rollouts, stored
        self._cursor = phases.cursor()
        """Where the draw of prompts stood after the last batch that was learned from."""
        self._split = phases.split
        # A user's algorithm may keep samples of older weights.
        self._checks_staleness = config.algorithm in shipped() and config.run.mode != "train_only"

    def run(self, last_step: int, metrics: dict[str, float]) -> StopDecision | None:
        """Take the steps after `last_step`; `metrics` are those of `last_step`.

        Returns the request that stopped the run before run.max_steps, or None. After a stop request, a
        checkpoint of the last complete step has been written.
        """
        config, step = self._config, self._phases.step
        if self._split is not None:
            self._split.begin(self._cursor["sampler"])
        if self._held_out and config.validation.before_training and last_step == 0:
            step.begin(0)
            validate(self._phases, self._held_out, config)
            self._finish_step()
            metrics = step.metrics
        for number in range(last_step + 1, config.run.max_steps + 1):
            step.fence()
            asked = self._stop.agree()
            if asked.save and number > 1:
                self._save(number - 1, metrics)
            if not asked.reason:
                try:
                    self._take_step(number)
                except StepAborted:
                    asked = self._stop.agree()
            if asked.reason:
                if number > 1:
                    self._save(number - 1, metrics)
                later = "" if asked.is_final else "; the same command continues from there"
                step.progress.line(f"stopped before step {number}: {asked.reason}{later}")
                return asked
            metrics = step.metrics
        return None

    def _take_step(self, number: int) -> None:
        """Collect a batch, learn from it, then validate, save a checkpoint and log if they are due.

        Raises StepAborted if a stop request ends the collection.
        """
        started, config, step = time.perf_counter(), self._config, self._phases.step
        step.begin(number)
        self._checkpoints.poll()
        with step.timed("step"):
            self._cursor = self._collect_and_learn()
        step.log_performance(num_ranks=job().world_size)
        step.metrics["training/epoch"] = self._phases.num_drawn / len(self._phases.prompts)
        is_last = number == config.run.max_steps
        if self._held_out and (number % config.validation.every == 0 or is_last):
            validate(self._phases, self._held_out, config)
        if config.checkpoint.every and (number % config.checkpoint.every == 0 or is_last):
            self._save(number, step.metrics)
        self._finish_step()
        saving = step.metrics.get("timing_s/save_checkpoint", 0.0)
        seconds = time.perf_counter() - started - saving
        if warning := self._stop.record_step(seconds, saving, unstoppable=seconds - step.abortable_s):
            step.progress.line(warning)

    def _collect_and_learn(self) -> dict:
        """Return the cursor of the batch that was learned from. The batch is freed before validation."""
        batch = self._collect()
        phases, asynchronous = self._phases, self._phases.carry_over or self._split  # never both
        phases.step.is_committed = True
        collected = copy.copy(batch)  # learn may change what the batch refers to
        phases.step.batch_tokens = int(batch.prompt_lengths.sum()), int(batch.lengths.sum())
        if len(batch):
            has_versions = batch.weight_versions is not None  # pairs with the data's responses have none
            if asynchronous is not None and has_versions:
                asynchronous.check(batch)
            elif self._checks_staleness and has_versions:
                check_staleness(batch, phases.engines.policy.version, limit=0)
            if self._config.run.mode != "rollout_only":
                self._algorithm.learn(phases, batch)
                if (policy := phases.engines.policy).needs:
                    phases.step.metrics |= policy.held_metrics()
        if self._rollouts is not None:
            self._rollouts.write(phases.step.number, collected, batch)
        if asynchronous is not None:
            asynchronous.learned()
        return batch.cursor

    def _collect(self) -> Batch:
        """Return the algorithm's batch, with the cursor after its prompts were drawn."""
        if self._stored is not None:
            with fail_together():
                batch = self._stored.batch(self._phases.step.number)
            if len(batch):
                self._phases.log_generated(batch)
        else:
            batch = self._algorithm.collect(self._phases)
        if not isinstance(batch, Batch):
            raise TypeError(
                f"collect of algorithm={self._config.algorithm} returned {type(batch).__name__}; return a "
                "Batch, an empty one (batch.keep_groups([])) if there is nothing to learn from."
            )
        batch.cursor = self._phases.cursor()
        return batch

    def _save(self, number: int, metrics: dict[str, float]) -> None:
        if self._split is not None:
            self._split.drain()
        if self._rollouts is not None:
            self._rollouts.flush()  # a run that continues from the checkpoint does not repeat these steps
        self._checkpoints.save(number, self._checkpoints.state(self._cursor), metrics)

    def _finish_step(self) -> None:
        """Write the step's metrics to log, console and status."""
        step = self._phases.step
        step.fence()
        if self._log is not None:
            self._log.write(step.number, step.metrics)
            step.progress.record(step.number, step.metrics)
            step.progress.line(step_line(step.number, self._config.run.max_steps, step.metrics))
        self._status.write(step=step.number)
        tracing.end_step()
