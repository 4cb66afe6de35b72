"""The run: set-up, then the steps, with validation, checkpoints and logging between the steps.

A step refits (the engine gets the present weights), collects (the algorithm generates and scores samples),
and learns (log-probs, advantages, updates). For example, GRPO's `collect` and `learn` are in
`rl.algorithms.grpo`.
"""

import time
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch.distributed as dist

from rl import algorithms
from rl.checkpoint.contents import weight_sums
from rl.checkpoint.store import CheckpointStore, Saved
from rl.config import wing
from rl.config.needs import generates_batches
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.engines.inputs import Inputs
from rl.faults.agreement import fail_together
from rl.faults.lock import check_lock
from rl.faults.watchdog import Watchdog
from rl.phases.phases import Phases
from rl.phases.policy_gradient import check_formulas
from rl.phases.step_record import StepRecord
from rl.run.changes import changes
from rl.run.checkpoints import RunCheckpoints, find_checkpoint
from rl.run.run_log import RunLog, complete_metrics
from rl.run.set_up import SetUp
from rl.run.validation import validate
from rl.run_directory import digests
from rl.run_directory.progress import Progress
from rl.run_directory.status import Status
from rl.runtime import start_up
from rl.runtime.device import Device
from rl.runtime.session import job
from rl.stopping.requests import STOP_FILE, STOPPED_EXIT, StepAborted, StopDecision, StopRequests


def run(config: Config, inputs: Inputs, device: Device, watchdog: Watchdog) -> int:
    """Run from the newest checkpoint, or from step 0, until the end or a stop. Collective over the world.

    Returns the exit code of the process: 0 at the end or after a stop by hand, STOPPED_EXIT after another
    stop, 1 after a wrong verdict of run.mode=check. Raises ConfigError, identical on every rank, if this run
    cannot continue from the checkpoints in run.dir, or must not because they belong to another run.
    """
    start_up.mark("Megatron")  # imported by this module
    with fail_together():
        algorithm = algorithms.load(config.algorithm)  # a user's file may raise anything
        check_formulas(config.objective)
    leads = dist.get_rank() == 0
    progress = Progress(leads, name=config.run.name, max_steps=config.run.max_steps)
    status = watchdog.status
    stop = StopRequests(config.run.dir, max_time=config.run.max_time)
    ranks = f"{dist.get_world_size()} rank{'s' if dist.get_world_size() > 1 else ''}"
    progress.line(f"{config.run.name}: {config.algorithm}, {ranks}, {len(inputs.prompts)} prompts")
    store = CheckpointStore(config, fence=partial(check_lock, watchdog.lock))
    newest, named = find_checkpoint(config, store)
    with fail_together():
        if leads:
            loop_of(config).check(config)
    if newest is not None and (changed := changes(config, store.config_of(newest))):
        words = ", ".join(f"{key}: {text}" for key, text in changed.items())
        noun = "key differs" if len(changed) == 1 else "keys differ"
        progress.line(f"{len(changed)} {noun} from {newest.path}: {words}")
    is_finished = is_complete(config, newest)
    if newest is not None and is_finished:
        # run.max_steps of this start may be smaller than the number of steps of the finished run.
        status.write(max_steps=newest.step)
        progress.line(f"already at step {newest.step} of {config.run.max_steps}: nothing to train")
        if leads:
            complete_metrics(config, newest, partial(check_lock, watchdog.lock))
        if not config.checkpoint.export_hf:
            status.write(state="finished", step=newest.step, checkpoint_step=newest.step)
            return 0

    set_up = SetUp(config, inputs, device, watchdog, is_finished=is_finished)
    if not set_up.trains:
        return set_up.generate(stop)
    phases = set_up.phases(progress, stop)
    asked, code = take_steps(config, algorithm, inputs, phases, status, stop, store, (newest, named))
    set_up.close()
    return note_end(status, asked, code)


def loop_of(config: Config) -> "type[TrainingLoop]":
    """Return the class whose `run` is the run: the steps of a training, or another option's."""
    return wing.door(config, "training") or TrainingLoop


def take_steps(
    config: Config,
    algorithm: ModuleType,
    inputs: Inputs,
    phases: Phases,
    status: Status,
    stop: StopRequests,
    store: CheckpointStore,
    found: tuple[Saved | None, Saved | None],
) -> tuple[StopDecision | None, int]:
    """Continue from the checkpoint, take the steps up to run.max_steps, and export the policy.

    Returns (request, code). request: the request that stopped the run, or None if all steps were taken.
    code: the exit code if all steps were taken. Collective over the world.

    found: result of `find_checkpoint`.
    """
    newest, named = found
    is_finished = is_complete(config, newest)
    checkpoints = RunCheckpoints(config, store, phases, status)
    last_step, metrics = checkpoints.resume(newest, named)
    start_up.mark("checkpoint")
    status.write(step=last_step, checkpoint_step=last_step)
    asked, code = None, 0
    if not is_finished:
        resumes = newest is not None
        kind = loop_of(config)
        kind.prepare(config, inputs, phases.step)
        log = RunLog(
            config, inputs, phases.step, status, last_step=last_step, metrics=metrics, resumes=resumes
        )
        if layers := phases.engines.policy.layers:
            phases.step.progress.line(f"training with {layers}")
        training = kind(config, algorithm, inputs, phases, checkpoints, log, stop)
        asked = training.run(last_step, metrics)
        code = training.exit_code
        checkpoints.close()
        phases.sampler.end(0 if asked is None or asked.by_hand else STOPPED_EXIT)
        log.close()
    if asked is None and config.checkpoint.export_hf:
        checkpoints.export(max(last_step, config.run.max_steps))
    if warning := phases.scoring.warning():
        phases.step.progress.line(warning)
    return asked, code


def is_complete(config: Config, newest: Saved | None) -> bool:
    """Return whether the newest checkpoint was written at the end of the last step."""
    return newest is not None and newest.step >= config.run.max_steps


def note_end(status: Status, asked: StopDecision | None, code: int = 0) -> int:
    """Write the end of a run into its status; return the exit code. asked, code: see `take_steps`."""
    if asked is None:
        status.write(state="finished")
        return code
    status.write(state="stopped", reason=asked.reason)
    return 0 if asked.by_hand else STOPPED_EXIT


class TrainingLoop:
    """The steps of a run. Methods are collective over the world.

    This class owns the order of a step: `refit`, `collect`, `learn`. First the generating engines get the
    weights that the previous step has learned. `collect` may return samples from earlier steps
    (`rl.phases.sampler`), for example with rollout.carry_over.
    """

    exit_code = 0
    """Exit code of a run that was not stopped."""

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ConfigError, before a model is built, if the run's files leave nothing to do. For rank 0."""

    @classmethod
    def prepare(cls, config: Config, inputs: Inputs, step: StepRecord) -> None:
        """Prepare run.dir before the log opens its files. Collective over the world."""

    def __init__(
        self,
        config: Config,
        algorithm: ModuleType,
        inputs: Inputs,
        phases: Phases,
        checkpoints: RunCheckpoints,
        log: RunLog,
        stop: StopRequests,
    ):
        self._config, self._algorithm, self._phases = config, algorithm, phases
        self._inputs, self._held_out = inputs, inputs.held_out
        self._checkpoints, self._log, self._stop = checkpoints, log, stop
        self._cursor = phases.cursor()
        """State of the draw of prompts after the last batch that was learned from."""

    def run(self, last_step: int, metrics: dict[str, float]) -> StopDecision | None:
        """Take the steps after `last_step`.

        Returns the request that stopped the run before run.max_steps, or None. After a stop request, a
        checkpoint of the last complete step has been written.

        metrics: the metrics of `last_step`. They are saved again if a stop request comes before the next
            step ends.
        """
        config, step = self._config, self._phases.step
        self._phases.sampler.begin(self._cursor)
        if self._held_out and config.validation.before_training and last_step == 0:
            step.begin(0)
            validate(self._phases, self._held_out, config, self._log.store_validation)
            self._log.write_step()
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
                    self._checkpoints.close()  # raises after a failed save, before the log line
                removed = f" after you remove {config.run.dir}/{STOP_FILE}" if asked.by_hand else ""
                later = "" if asked.is_final else f"; the same command continues from there{removed}"
                step.progress.line(f"stopped before step {number}: {asked.reason}{later}")
                return asked
            metrics = step.metrics
        return None

    def _take_step(self, number: int) -> None:
        """Refit, collect a batch and learn from it; then validate, save a checkpoint and log, if each is due.

        Raises StepAborted if a stop request ends the collection.
        """
        started, config, step = time.perf_counter(), self._config, self._phases.step
        step.begin(number)
        self._checkpoints.poll()
        with step.timed("step"):
            if generates_batches(config):
                self._phases.sampler.refit()
            self._checkpoints.check_resumed()
            self._cursor = self._collect_and_learn()
        self._phases.draw.num_learned = self._phases.draw.num_drawn
        self._phases.draw.check_cursor(self._cursor)
        step.log_performance(num_ranks=job().world_size)
        step.metrics["training/epoch"] = self._phases.draw.epochs
        is_last = number == config.run.max_steps
        if self._held_out and (number % config.validation.every == 0 or is_last):
            validate(self._phases, self._held_out, config, self._log.store_validation)
        if config.checkpoint.every and (number % config.checkpoint.every == 0 or is_last):
            self._save(number, step.metrics)
        self._log.write_step()
        saving = step.metrics.get("timing_s/save_checkpoint", 0.0)
        seconds = time.perf_counter() - started - saving
        if warning := self._stop.record_step(seconds, saving, unstoppable=seconds - step.abortable_s):
            step.progress.line(warning)

    def _collect_and_learn(self) -> dict:
        """Collect and learn; return the position in the prompts from which a resume continues.

        The batch is freed before validation.
        """
        batch = self._collect()
        cursor, phases = self._phases.cursor(), self._phases
        phases.step.is_committed = True
        collected = replace(batch)  # learn may replace columns of the batch
        phases.step.batch_tokens = int(batch.prompt_lengths.sum()), int(batch.lengths.sum())
        learns = len(batch) > 0 and self._config.run.mode != "rollout_only"
        if len(batch):
            if batch.weight_versions is not None:  # pairs from the data have no policy version
                phases.sampler.check(batch)
            if learns:
                self._algorithm.learn(phases, batch)
                phases.step.metrics |= phases.engines.policy.parts.metrics(phases.step.device.torch)
        self._log.store(collected, batch, self._weight_digests(learns=learns))
        phases.sampler.learned()
        return cursor

    def _weight_digests(self, *, learns: bool) -> dict[str, str | list[float]]:
        """Return digests of the weights after the step, and of the state from which this process started."""
        found: dict[str, str | list[float]] = {}
        if self._phases.step.is_first_of_start and (start := self._phases.checks.start) is not None:
            found[digests.START] = start.digest
        if learns:
            found[digests.WEIGHTS] = weight_sums(self._phases.engines.policy)
        return found

    def _collect(self) -> Batch:
        """Return the batch of the step."""
        batch = self._phases.sampler.collect(self._phases, self._algorithm.collect)
        if not isinstance(batch, Batch):
            raise TypeError(
                f"collect of algorithm={self._config.algorithm} returned {type(batch).__name__}; return a "
                "Batch, an empty one (batch.keep_groups([])) if there is nothing to learn from."
            )
        return batch

    def _save(self, number: int, metrics: dict[str, float]) -> None:
        self._phases.sampler.before_save()
        self._log.flush()
        self._checkpoints.save(number, self._checkpoints.state(self._cursor), metrics)
