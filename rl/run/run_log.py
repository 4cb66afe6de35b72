"""The log of a run's steps on rank 0: metrics, the console line, and the samples."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rl.checkpoint.directory import Saved
from rl.config.needs import generates_batches, generates_held_out, learns, learns_from_samples
from rl.config.schema import Config
from rl.data.batch import Batch, fingerprint
from rl.data.prompt_order import warn_of_repeated_rows
from rl.data.prompts import num_shared
from rl.data.rendering import note_of_strings, warn_of_unlike_prompts
from rl.engines.inputs import Inputs
from rl.faults.agreement import fail_together
from rl.phases.step_record import StepRecord
from rl.run_directory import consumed, digests, event_files, rollout_files
from rl.run_directory.metric_log import FILE_NAME, STEP, MetricLog, keep_lines_up_to, read_records, step_line
from rl.run_directory.record import record_run, writing
from rl.run_directory.status import Status
from rl.run_directory.trackers import followers
from rl.runtime import start_up, tracing
from rl.runtime.session import job

if TYPE_CHECKING:  # pyarrow is imported by the runs that store samples
    from rl.run.rollout_writer import RolloutWriter


class RunLog:
    """The files of a run's steps. Only rank 0 writes; only the constructor is collective.

    Args:
        metrics: if `resumes`, the metrics of `last_step`, read from the checkpoint that the run continues.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        step: StepRecord,
        status: Status,
        *,
        last_step: int,
        metrics: dict[str, float],
        resumes: bool,
    ):
        self._max_steps, self._step, self._status = config.run.max_steps, step, status
        self._metrics: MetricLog | None = None
        self._rollouts: RolloutWriter | None = None
        self._digests: digests.DigestLog | None = None
        self._stores_batches = generates_batches(config)
        resumed = f", resuming after step {last_step}" if last_step else ""
        with fail_together(), writing(config.run.dir):
            if dist.get_rank() == 0:
                self._metrics = _open_metrics(config, last_step, step.fence)
                if resumes and last_step > self._metrics.last_step:  # killed after the checkpoint, before
                    self._metrics.write(last_step, metrics)
                self._rollouts = _open_rollouts(config, inputs, step.fence)
                self._digests = digests.DigestLog(config.run.dir)
        start_up.mark("record")
        step.progress.line(f"ready in {start_up.summary()}, run directory {config.run.dir}{resumed}")
        trains = dist.get_rank() == 0 and learns(config)
        if trains and (shared := num_shared(inputs.prompts, inputs.held_out)):
            step.progress.line(
                f"warning: data check: {shared} of {len(inputs.held_out)} prompts of data.val are in "
                "data.train too, so validation does not measure what the policy generalises."
            )
        if trains and (warning := warn_of_unlike_prompts(inputs.prompts, inputs.held_out)):
            step.progress.line(warning)
        draws = trains and config.run.mode != "train_only"
        if draws and (warning := warn_of_repeated_rows(len(inputs.prompts), config.data.prompts_per_step)):
            step.progress.line(warning)
        asks = trains and learns_from_samples(config) and not config.agents.is_on
        if asks and (note := note_of_strings(inputs.prompts, inputs.tokenizer)):
            step.progress.line(note)

    def store(self, collected: Batch, learned: Batch, weights: dict[str, Any]) -> None:
        """Store the step's digests and samples.

        collected: a shallow copy of the batch from before `learn`. weights: digests of the weights, by stage.
        """
        if self._digests is not None:
            self._digests.append(self._step.number, _digests(collected, learned) | weights)
        if self._rollouts is not None and self._stores_batches:
            self._rollouts.write(self._step.number, collected, learned)

    def store_validation(self, name: str, batch: Batch, answers: list[str | None] | None) -> None:
        """Store the samples of a validation (`rl.run.validation.PASSES`). answers: of the samples, if any."""
        if self._rollouts is not None:
            self._rollouts.write_validation(self._step.number, name, batch, answers)

    def flush(self) -> None:
        """Wait until the samples of all steps are stored. A resumed run does not repeat these steps."""
        if self._rollouts is not None:
            self._rollouts.flush()

    def write_step(self) -> None:
        """Write the step's metrics to log, console and status."""
        step = self._step
        step.fence()
        if self._metrics is not None:
            self._metrics.write(step.number, step.metrics)
            step.progress.record(step.number, step.metrics)
            step.progress.line(step_line(step.number, self._max_steps, step.metrics))
        self._status.write(step=step.number)
        tracing.end_step()

    def close(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._rollouts, self._digests):
            if file is not None:
                file.close()


def complete_metrics(config: Config, saved: Saved, fence: Callable[[], None]) -> None:
    """Write the last step's metrics if the run was killed after its last checkpoint and before writing them.

    Only for rank 0. saved: the run's last checkpoint.
    """
    path = Path(config.run.dir, FILE_NAME)
    if path.exists() and any(record[STEP] >= saved.step for record in read_records(path)):
        return
    fence()
    log = MetricLog(config.run.dir, resume_step=saved.step, followers=followers(config, fence))
    log.write(saved.step, saved.metrics)
    log.close()


def _open_metrics(config: Config, last_step: int, fence: Callable[[], None]) -> MetricLog:
    """Remove the files of later steps, open the metric log, and record the config and the environment."""
    fence()
    is_shown = learns(config) and config.run.mode != "check"
    shown = followers(config, fence) if is_shown else []
    log = MetricLog(config.run.dir, resume_step=last_step or None, followers=shown)
    for name in (consumed.FILE_NAME, digests.FILE_NAME):
        if (path := Path(config.run.dir, name)).exists():
            keep_lines_up_to(path, last_step or None)
    for directory in rollout_files.DIRECTORIES if learns(config) else ():
        rollout_files.remove_after(config.run.dir, last_step or -1, directory)
    event_files.remove_after(config.run.dir, last_step)
    record_run(config, last_step, world_size=job().world_size, start_up_s=start_up.parts)
    return log


def _digests(collected: Batch, learned: Batch) -> dict[str, Any]:
    """Return the digest of each stage of the batch that a step has filled."""
    from rl.run.rollout_writer import STORED, stored_arrays

    arrays = {
        STORED[name].stored_as or name: values for name, values in stored_arrays(collected, learned).items()
    }
    ids = {"prompts": collected.prompt_ids, "tokens": collected.response_ids}
    found: dict[str, Any] = {stage: f"{fingerprint(values):016x}" for stage, values in ids.items()}
    filled = {stage: arrays[column] for stage, column in digests.STAGES.items() if column in arrays}
    return found | {stage: digests.digest_of(values) for stage, values in filled.items()}


def _open_rollouts(config: Config, inputs: Inputs, fence: Callable[[], None]) -> "RolloutWriter | None":
    """Return the writer that `logging.rollouts` asks for, or None.

    Batches that come from the data or from stored rollouts are not stored.
    """
    if config.logging.rollouts == "none" or not (generates_batches(config) or generates_held_out(config)):
        return None
    from rl.run.rollout_writer import RolloutWriter

    return RolloutWriter(config, inputs.tokenizer, inputs.kept_ids, fence=fence)
