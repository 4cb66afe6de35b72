"""The run: set-up, steps, validation, checkpoints, the log."""

import time
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from rl import algorithms
from rl.checkpoint.hf import export_hf
from rl.checkpoint.rng import reseed_rng
from rl.checkpoint.store import CheckpointStore, Saved
from rl.config import Config, needs_reward
from rl.engines import build_engines
from rl.inputs import Inputs
from rl.options import ConfigError
from rl.phases import SAMPLES_FILE, Phases
from rl.rollout.engine import seed_of
from rl.runtime.agreement import fail_together
from rl.runtime.device import Device
from rl.runtime.metrics import MetricLog, keep_lines_up_to, step_line
from rl.runtime.progress import Progress
from rl.runtime.record import record_run
from rl.scoring import Scorer, start_pool
from rl.training.grid import build_grid
from rl.validation import validate


def run(config: Config, inputs: Inputs, device: Device) -> None:
    """Take the run from its newest checkpoint, or the start, to its end. Collective over the world.

    Raises ConfigError, on every rank alike, for checkpoints in run.dir that this run may not or cannot continue.
    """
    started = time.perf_counter()
    with fail_together():
        algorithm = algorithms.load(config.algorithm)  # a file of the user's may raise anything
    leads = dist.get_rank() == 0
    progress = Progress(leads)
    ranks = f"{dist.get_world_size()} rank{'s' if dist.get_world_size() > 1 else ''}"
    progress.line(f"{config.run.name}: {config.algorithm}, {ranks}, {len(inputs.prompts)} prompts")
    store = CheckpointStore(config)
    newest = store.newest()
    resume = config.checkpoint.resume
    named = None
    if resume not in ("auto", "never") and (newest is None or config.checkpoint.weights_only):
        named = store.named(resume)
    if newest is not None and resume == "never" and config.checkpoint.every:
        # Before anything is built. Retention and the next resume would take the old run's checkpoints for this one's.
        raise ConfigError(
            f"checkpoint.resume=never, but {store.directory} holds checkpoints of an earlier run; "
            "set checkpoint.resume=auto to continue it, or another run.dir."
        )
    finished = newest is not None and resume != "never" and newest.step >= config.run.max_steps
    if finished:
        progress.line(f"already at step {newest.step} of {config.run.max_steps}: nothing to train")
        if not config.checkpoint.export_hf:
            return

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
    )
    last_step, metrics = _resume(config, store, newest, named, phases)
    log = None
    if leads and not finished:
        resume_step = last_step or None
        log = MetricLog(config.run.dir, tensorboard=config.logging.tensorboard, resume_step=resume_step)
        if newest is not None and last_step > log.last_step:  # killed between the checkpoint and the record of its step
            log.write(last_step, metrics)
        if config.logging.samples:
            keep_lines_up_to(Path(config.run.dir, SAMPLES_FILE), resume_step)
        record_run(config, last_step)
    if not finished:
        resumed = f", resuming after step {last_step}" if last_step else ""
        progress.line(f"ready in {time.perf_counter() - started:.1f} s, run directory {config.run.dir}{resumed}")
        _train(config, algorithm, inputs, phases, store, log, last_step)
    if config.checkpoint.export_hf:
        target = str(Path(config.run.dir, "hf"))
        export_hf(engines.policy, config.model.path, target)
        progress.line(f"wrote {target}, a Hugging Face checkpoint of step {max(last_step, config.run.max_steps)}")
    if log is not None:
        log.close()
    if pool is not None:
        pool.close()
    engines.close()


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
        reseed_rng(seed_of(config.run.seed, "start"))  # a reward function, say, may draw from a generator nobody has seeded
        return 0, {}
    state = store.load(saved, models, seed=seed_of(config.run.seed, "resume", saved.step))
    try:
        phases.kl_controller.load_state_dict(state["kl_controller"])
    except ValueError as error:
        raise ConfigError(f"{saved.path} was written with another objective.reward_kl.controller: {error}") from error
    try:
        phases.sampler.load_state_dict(state["sampler"])
    except ValueError as error:
        raise ConfigError(f"{saved.path} was written with other data: {error}") from error
    return state["step"], state["metrics"]


def _train(
    config: Config, algorithm: ModuleType, inputs: Inputs, phases: Phases, store: CheckpointStore, log: MetricLog | None, last_step: int
) -> None:
    max_steps, world = config.run.max_steps, dist.get_world_size()

    def finish_step(step):
        if log is not None:
            log.write(step, phases.metrics)
            phases.progress.line(step_line(step, max_steps, phases.metrics))

    if inputs.held_out and config.validation.before_training and last_step == 0:
        phases.begin_step(0)
        validate(phases, inputs.held_out, config)
        finish_step(0)
    for step in range(last_step + 1, max_steps + 1):
        phases.begin_step(step)
        if store.is_saving:
            with phases.timed("save_checkpoint"):
                store.poll()
        with phases.timed("step"):
            algorithm.step(phases, config)
        seconds, tokens = phases.metrics["timing_s/step"], phases.num_tokens
        phases.metrics["perf/total_num_tokens"] = tokens
        phases.metrics["perf/throughput"] = tokens / seconds / world
        if inputs.held_out and (step % config.validation.every == 0 or step == max_steps):
            validate(phases, inputs.held_out, config)
        every = config.checkpoint.every
        if every and (step % every == 0 or step == max_steps):
            with phases.timed("save_checkpoint"):
                state = {"sampler": phases.sampler.state_dict(), "kl_controller": phases.kl_controller.state_dict()}
                store.save(step, phases.engines.learning, state, phases.metrics)
        finish_step(step)
    store.close()
