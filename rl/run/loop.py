"""The run: set-up, steps, validation, checkpoints, the log."""

import json
import time
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from rl import algorithms
from rl.checkpoint.hf import export_hf
from rl.checkpoint.rng import reseed_rng
from rl.checkpoint.store import CheckpointStore, Saved
from rl.config.options import ConfigError
from rl.config.schema import Config, needs_reward
from rl.engines.engines import build_engines
from rl.engines.inputs import Inputs
from rl.faults.agreement import Agreement, fail_together
from rl.faults.lock import check_lock
from rl.faults.watchdog import Watch
from rl.phases.phases import SAMPLES_FILE, Phases
from rl.phases.scoring import Scorer, start_pool
from rl.rollout.engine import seed_of
from rl.run.validation import validate
from rl.run_directory.metric_log import MetricLog, keep_lines_up_to, step_line
from rl.run_directory.progress import Progress
from rl.run_directory.record import code_hashes, record_run
from rl.run_directory.status import Status
from rl.runtime.device import Device
from rl.runtime.groups import limit_collectives, warm_up
from rl.runtime.session import control_group
from rl.stopping.requests import STOPPED_EXIT, Asked, StepAborted, StopRequests
from rl.training.grid import build_grid


def run(config: Config, inputs: Inputs, device: Device, watch: Watch) -> int:
    """Take the run from its newest checkpoint, or the start, to its end or until it is to stop; returns the exit code of the
    process: 0, or STOPPED_EXIT if it is to be continued. Collective over the world.

    Raises ConfigError, on every rank alike, for checkpoints in run.dir that this run may not or cannot continue.
    """
    started = time.perf_counter()
    with fail_together():
        algorithm = algorithms.load(config.algorithm)  # a file of the user's may raise anything
    leads = dist.get_rank() == 0
    progress = Progress(leads)
    status = watch.status
    stop = StopRequests(config.run.dir, max_time=config.run.max_time)
    ranks = f"{dist.get_world_size()} rank{'s' if dist.get_world_size() > 1 else ''}"
    progress.line(f"{config.run.name}: {config.algorithm}, {ranks}, {len(inputs.prompts)} prompts")
    store = CheckpointStore(config, fence=lambda: check_lock(watch.lock))
    newest, named = _find_checkpoint(config, store)
    finished = (
        newest is not None and config.checkpoint.resume != "never" and newest.step >= config.run.max_steps
    )
    if finished:
        progress.line(f"already at step {newest.step} of {config.run.max_steps}: nothing to train")
        if not config.checkpoint.export_hf:
            status.write(state="finished", step=newest.step, checkpoint_step=newest.step)
            return 0

    pool = None
    with fail_together():
        if needs_reward(config) and not finished:
            pool = start_pool(config, inputs)
    training = config.training
    agreement = Agreement(config, json.dumps(code_hashes(config)), control_group())
    grid = build_grid(
        tp=training.tp, pp=training.pp, ep=training.ep, etp=training.expert_tp, seed=config.run.seed
    )
    warm_up(device)
    engines = build_engines(config, inputs, grid, device, generate=not finished)
    limit_collectives(config.watchdog.limits)
    scorer = None if pool is None else Scorer(config, inputs, device, engines, pool)
    phases = Phases(
        config,
        device=device,
        engines=engines,
        tokenizer=inputs.tokenizer,
        prompts=inputs.prompts,
        sampler=inputs.sampler(),
        scorer=scorer,
        progress=progress,
        watch=watch,
        agreement=agreement,
        stop=stop,
    )
    last_step, phases.metrics = _resume(config, store, newest, named, phases)
    status.write(step=last_step, checkpoint_step=last_step)
    log, asked = None, None
    if leads and not finished:
        resume_step = last_step or None
        log = MetricLog(config.run.dir, tensorboard=config.logging.tensorboard, resume_step=resume_step)
        if (
            newest is not None and last_step > log.last_step
        ):  # killed between the checkpoint and the record of its step
            log.write(last_step, phases.metrics)
        if config.logging.samples:
            keep_lines_up_to(Path(config.run.dir, SAMPLES_FILE), resume_step)
        record_run(config, last_step)
    if not finished:
        resumed = f", resuming after step {last_step}" if last_step else ""
        progress.line(
            f"ready in {time.perf_counter() - started:.1f} s, run directory {config.run.dir}{resumed}"
        )
        saves = Saves(store, phases, status)
        asked = _train(config, algorithm, inputs, phases, saves, log, stop, last_step)
        saves.close()
    if asked is None and config.checkpoint.export_hf:
        target = str(Path(config.run.dir, "hf"))
        with phases.saving():
            export_hf(engines.policy, config.model.path, target)
        progress.line(
            f"wrote {target}, a Hugging Face checkpoint of step {max(last_step, config.run.max_steps)}"
        )
    if log is not None:
        log.close()
    if pool is not None:
        pool.close()
    engines.close()
    if asked is None:
        status.write(state="finished", step=max(last_step, config.run.max_steps))
        return 0
    status.write(state="stopped", reason=asked.reason)
    return 0 if asked.by_hand else STOPPED_EXIT


def _find_checkpoint(config: Config, store: CheckpointStore) -> tuple[Saved | None, Saved | None]:
    """The newest checkpoint of this run, and the one that checkpoint.resume names if it is to be read."""
    newest, resume = store.newest(), config.checkpoint.resume
    if newest is not None and resume == "never" and config.checkpoint.every:
        # Before anything is built. Retention and the next resume would take the old run's checkpoints for this one's.
        raise ConfigError(
            f"checkpoint.resume=never, but {store.directory} holds checkpoints of an earlier run; "
            "set checkpoint.resume=auto to continue it, or another run.dir."
        )
    is_path = resume not in ("auto", "never")
    return newest, store.named(resume) if is_path and (
        newest is None or config.checkpoint.weights_only
    ) else None


def _resume(
    config: Config, store: CheckpointStore, newest: Saved | None, named: Saved | None, phases: Phases
) -> tuple[int, dict[str, float]]:
    """Load the run's newest checkpoint, or the one that checkpoint.resume names, if there is one and it is wanted; returns the
    step to go on after and its metrics."""
    models = phases.engines.learning
    if named is not None and config.checkpoint.weights_only:
        store.load_weights(named, models)
        for model in models.values():
            model.start_from_present_weights()
        phases.progress.line(f"weights of {named.path}")
        named = None
    saved = named if newest is None else newest
    if saved is None or config.checkpoint.resume == "never":
        reseed_rng(
            seed_of(config.run.seed, "start")
        )  # a reward function, say, may draw from a generator nobody has seeded
        return 0, {}
    state = store.load(saved, models, seed=seed_of(config.run.seed, "resume", saved.step))
    try:
        phases.kl_controller.load_state_dict(state["kl_controller"])
    except ValueError as error:
        raise ConfigError(
            f"{saved.path} was written with another objective.reward_kl.controller: {error}"
        ) from error
    try:
        phases.sampler.load_state_dict(state["sampler"])
    except ValueError as error:
        raise ConfigError(f"{saved.path} was written with other data: {error}") from error
    return state["step"], state["metrics"]


class Saves:
    """The checkpoints that a run writes. Methods are collective over the world."""

    def __init__(self, store: CheckpointStore, phases: Phases, status: Status):
        self._store, self._phases, self.status = store, phases, status

    def state(self) -> dict:
        """What a checkpoint holds beside the models: where the run stands in its data, and what adapts. Not collective."""
        return {
            "sampler": self._phases.sampler.state_dict(),
            "kl_controller": self._phases.kl_controller.state_dict(),
        }

    def save(self, step: int, state: dict, metrics: dict[str, float]) -> None:
        """Write the checkpoint of a step, or begin to; nothing to do if it was written. The models are as they were at its end,
        `state` and `metrics` are what they were then."""
        with self._phases.saving():
            self._store.save(step, self._phases.engines.learning, state, metrics)
        self._note()

    def poll(self) -> None:
        """Complete what was written in the background, if it is all there."""
        if self._store.is_saving:
            with self._phases.timed("save_checkpoint"):
                self._store.poll()
            self._note()

    def close(self) -> None:
        """Wait for what is being written."""
        self._store.close()
        self._note()

    def _note(self) -> None:
        if self._store.complete_step is not None:
            self.status.write(checkpoint_step=self._store.complete_step)


def _train(
    config: Config,
    algorithm: ModuleType,
    inputs: Inputs,
    phases: Phases,
    saves: Saves,
    log: MetricLog | None,
    stop: StopRequests,
    last_step: int,
) -> Asked | None:
    """The steps after last_step. Returns what ended them before run.max_steps, if something did; there is a checkpoint then."""
    max_steps, world, every = config.run.max_steps, dist.get_world_size(), config.checkpoint.every

    def finish_step(step):
        if log is not None:
            log.write(step, phases.metrics)
            phases.progress.line(step_line(step, max_steps, phases.metrics))
        saves.status.write(step=step)

    if inputs.held_out and config.validation.before_training and last_step == 0:
        phases.begin_step(0)
        validate(phases, inputs.held_out, config)
        finish_step(0)
    for step in range(last_step + 1, max_steps + 1):
        began, state, metrics = time.perf_counter(), saves.state(), phases.metrics
        asked = stop.agree()
        if asked.save and step > 1:
            saves.save(step - 1, state, metrics)
        if not asked.reason:
            phases.begin_step(step)
            saves.poll()
            try:
                with phases.timed("step"):
                    algorithm.step(phases, config)
            except StepAborted:
                asked = stop.agree()
        if asked.reason:
            if step > 1:
                saves.save(step - 1, state, metrics)
            phases.progress.line(
                f"stopped before step {step}: {asked.reason}; the same command goes on from there"
            )
            return asked
        seconds, tokens = phases.metrics["timing_s/step"], phases.num_tokens
        phases.metrics["perf/total_num_tokens"] = tokens
        phases.metrics["perf/throughput"] = tokens / seconds / world
        if inputs.held_out and (step % config.validation.every == 0 or step == max_steps):
            validate(phases, inputs.held_out, config)
        if every and (step % every == 0 or step == max_steps):
            saves.save(step, saves.state(), phases.metrics)
        finish_step(step)
        saving = phases.metrics.get("timing_s/save_checkpoint", 0.0)
        whole = time.perf_counter() - began - saving
        generating = (
            phases.metrics["timing_s/gen"]
            if phases.stop is not None and "timing_s/gen" in phases.metrics
            else 0.0
        )
        if warning := stop.measured(whole, saving, unstoppable=whole - generating):
            phases.progress.line(warning)
    return None
