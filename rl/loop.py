"""The run: set-up, steps, validation, checkpoints, the log."""

import time
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from rl import algorithms
from rl.checkpoint.hf import export_hf
from rl.checkpoint.store import CheckpointStore, Saved
from rl.config import Config, needs_reward
from rl.engines import build_engines
from rl.inputs import Inputs
from rl.options import ConfigError
from rl.phases import SAMPLES_FILE, Phases
from rl.runtime.agreement import fail_together
from rl.runtime.device import Device
from rl.runtime.metrics import MetricLog, keep_lines_up_to, step_line
from rl.runtime.progress import Progress
from rl.runtime.record import record_run
from rl.runtime.status import Status
from rl.runtime.stop import STOPPED_EXIT, Asked, StepAborted, StopRequests
from rl.scoring import Scorer, start_pool
from rl.training.grid import build_grid
from rl.validation import validate


def run(config: Config, inputs: Inputs, device: Device) -> int:
    """Take the run from its newest checkpoint, or the start, to its end or until it is to stop; returns the exit code of the
    process: 0, or STOPPED_EXIT if it is to be continued. Collective over the world.

    Raises ConfigError, on every rank alike, for checkpoints in run.dir that this run may not or cannot continue.
    """
    started = time.perf_counter()
    with fail_together():
        algorithm = algorithms.load(config.algorithm)  # a file of the user's may raise anything
    leads = dist.get_rank() == 0
    progress = Progress(leads)
    status = Status(config.run.dir, max_steps=config.run.max_steps, leads=leads)
    stop = StopRequests(config.run.dir, max_time=config.run.max_time)
    ranks = f"{dist.get_world_size()} rank{'s' if dist.get_world_size() > 1 else ''}"
    progress.line(f"{config.run.name}: {config.algorithm}, {ranks}, {len(inputs.prompts)} prompts")
    store = CheckpointStore(config.run.dir, keep=config.checkpoint.keep)
    newest = store.newest()
    if newest is not None and config.checkpoint.resume == "never" and config.checkpoint.every:
        # Before anything is built. Retention and the next resume would take the old run's checkpoints for this one's.
        raise ConfigError(
            f"checkpoint.resume=never, but {store.directory} holds checkpoints of an earlier run; "
            "set checkpoint.resume=auto to continue it, or another run.dir."
        )
    finished = newest is not None and config.checkpoint.resume == "auto" and newest.step >= config.run.max_steps
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
    grid = build_grid(tp=training.tp, pp=training.pp, ep=training.ep, etp=training.expert_tp, seed=config.run.seed)
    engines = build_engines(config, inputs, grid, device, generate=not finished)
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
        stop=stop,
    )
    last_step = _resume(config, store, newest, phases)
    status.write(step=last_step, checkpoint_step=last_step)
    log, asked = None, None
    if leads and not finished:
        resume_step = last_step or None
        log = MetricLog(config.run.dir, tensorboard=config.logging.tensorboard, resume_step=resume_step)
        if config.logging.samples:
            keep_lines_up_to(Path(config.run.dir, SAMPLES_FILE), resume_step)
        record_run(config, last_step)
    if not finished:
        resumed = f", resuming after step {last_step}" if last_step else ""
        progress.line(f"ready in {time.perf_counter() - started:.1f} s, run directory {config.run.dir}{resumed}")
        asked = _train(config, algorithm, inputs, phases, store, log, last_step, stop, status)
    if asked is None and config.checkpoint.export_hf:
        target = str(Path(config.run.dir, "hf"))
        export_hf(engines.policy, config.model.path, target)
        progress.line(f"wrote {target}, a Hugging Face checkpoint of step {max(last_step, config.run.max_steps)}")
    if log is not None:
        log.close()
    if pool is not None:
        pool.close()
    engines.close()
    if asked is None:
        status.write(state="finished", step=max(last_step, config.run.max_steps))
    return STOPPED_EXIT if asked is not None and not asked.by_hand else 0


def _resume(config: Config, store: CheckpointStore, newest: Saved | None, phases: Phases) -> int:
    """Load the newest checkpoint if there is one and it is wanted; returns its step, else 0."""
    if newest is None or config.checkpoint.resume == "never":
        return 0
    state = store.load(newest, phases.engines.learning)
    try:
        phases.kl_controller.load_state_dict(state["kl_controller"])
    except ValueError as error:
        raise ConfigError(f"{newest.path} was written with another objective.reward_kl.controller: {error}") from error
    try:
        phases.sampler.load_state_dict(state["sampler"])
    except ValueError as error:
        raise ConfigError(f"{newest.path} was written with other data: {error}") from error
    return state["step"]


def _train(
    config: Config, algorithm: ModuleType, inputs: Inputs, phases: Phases, store: CheckpointStore, log: MetricLog | None,
    last_step: int, stop: StopRequests, status: Status,
) -> Asked | None:  # fmt: skip
    """The steps after last_step. Returns what ended them before run.max_steps, if something did; there is a checkpoint then."""
    max_steps, world = config.run.max_steps, dist.get_world_size()

    def finish_step(step):
        if log is not None:
            log.write(step, phases.metrics)
            phases.progress.line(step_line(step, max_steps, phases.metrics))
        status.write(step=step)

    if inputs.held_out and config.validation.before_training and last_step == 0:
        phases.begin_step(0)
        validate(phases, inputs.held_out, config)
        finish_step(0)
    saved = last_step

    def save(step, state):
        nonlocal saved
        with phases.timed("save_checkpoint"):
            store.save(step, phases.engines.learning, state)
        saved = step
        status.write(checkpoint_step=step)

    for step in range(last_step + 1, max_steps + 1):
        began, state = time.perf_counter(), _state(phases)
        asked = stop.agree()
        if asked.save and saved < step - 1:
            save(step - 1, state)
        if not asked.reason:
            phases.begin_step(step)
            try:
                with phases.timed("step"):
                    algorithm.step(phases, config)
            except StepAborted:
                asked = stop.agree()
        if asked.reason:
            if saved < step - 1:
                save(step - 1, state)
            status.write(state="stopped", reason=asked.reason)
            phases.progress.line(f"stopped before step {step}: {asked.reason}; the same command goes on after step {saved}")
            return asked
        seconds, tokens = phases.metrics["timing_s/step"], phases.num_tokens
        phases.metrics["perf/total_num_tokens"] = tokens
        phases.metrics["perf/throughput"] = tokens / seconds / world
        if inputs.held_out and (step % config.validation.every == 0 or step == max_steps):
            validate(phases, inputs.held_out, config)
        every = config.checkpoint.every
        if every and (step % every == 0 or step == max_steps):
            save(step, _state(phases))
        finish_step(step)
        saving = phases.metrics.get("timing_s/save_checkpoint", 0.0)
        whole = time.perf_counter() - began - saving
        generating = phases.metrics["timing_s/gen"] if phases.stop is not None and "timing_s/gen" in phases.metrics else 0.0
        if warning := stop.measured(whole, saving, unstoppable=whole - generating):
            phases.progress.line(warning)
    return None


def _state(phases: Phases) -> dict:
    """What a checkpoint holds beside the models: where the run stands in its data, and what adapts."""
    return {"sampler": phases.sampler.state_dict(), "kl_controller": phases.kl_controller.state_dict()}
