"""`run.mode=evaluate`: the validation of a run, at its checkpoints, without training.

    srun lockstep train --config my.yaml run.mode=evaluate

`checkpoint.resume` says what is measured. auto: all checkpoints of `run.dir`. never: the model in
`model.path`. A path: that checkpoint, or all checkpoints of that run directory.

All ranks and engines work. No optimizer and no gradient buffer is built. The results are in `<run.dir>-eval`:
`evaluation.json`, `metrics.jsonl` with the step of each checkpoint, and the samples in `validation/`. After a
stop or a kill the same command continues with the next pass. An evaluation with other settings first moves
the results of the earlier one to `<run.dir>-eval.1`.
"""

import zlib
from pathlib import Path

import torch.distributed as dist

from rl.checkpoint.directory import MANIFEST, Saved, complete
from rl.checkpoint.start import check_loaded
from rl.checkpoint.store import CheckpointStore
from rl.config.options import ConfigError, listed
from rl.config.schema import SUFFIXES, Config
from rl.engines.inputs import Inputs
from rl.faults.agreement import fail_together
from rl.features.evaluate.results import FILE_NAME, CheckpointMetrics, Results, set_aside, table
from rl.phases.step_record import StepRecord
from rl.run.loop import TrainingLoop
from rl.run.validation import measure, passes
from rl.run_directory.record import writing
from rl.runtime.collectives import broadcast_object
from rl.stopping.requests import StopDecision

VALIDATION = "val-core/", "val-aux/", "val/"


class Evaluation(TrainingLoop):
    """Measures each checkpoint that the config names, in order, or the model."""

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ConfigError if there is no checkpoint to measure. For rank 0."""
        if config.checkpoint.resume != "never":
            checkpoints(config)

    @classmethod
    def prepare(cls, config: Config, inputs: Inputs, step: StepRecord) -> None:
        """Move the results of another evaluation out of the directory. Collective over the world."""
        with fail_together(), writing(config.run.dir):
            if dist.get_rank() == 0:
                step.fence()
                if (place := set_aside(config, inputs.held_out, targets(config))) is not None:
                    own = config.run.dir
                    step.progress.line(f"{own} has an evaluation with other settings; moved it to {place}")

    def run(self, last_step: int, metrics: dict[str, float]) -> StopDecision | None:
        """Measure, write the results and print them; return the stop request that ended it, if any.

        Collective over the world. Raises ConfigError if a named checkpoint is absent or damaged.
        """
        config, leads, step = self._config, dist.get_rank() == 0, self._phases.step
        store = CheckpointStore(config)
        self._phases.sampler.begin(self._cursor)
        with fail_together():
            self._results = Results(config, self._held_out) if leads else None
            found = [] if self._results is None else [self._results.of(each) for each in targets(config)]
        measured = broadcast_object(found, types=[CheckpointMetrics])
        for result in measured:
            missing = [name for name in passes(config) if name not in result.passes]
            if missing:
                self._load(store, result)
            step.begin(result.step)
            for name in missing:
                if (asked := self._stop.agree()).reason:
                    step.progress.line(f"stopped: {asked.reason}; the same command continues from here")
                    return asked
                self._measure(name, result)
            step.metrics = step.metrics | result.metrics
            self._log.write_step()
        step.progress.line(
            f"{table(measured)}{self._without_votes(measured)}\nwrote {config.run.dir}/{FILE_NAME}"
        )
        return None

    def _load(self, store: CheckpointStore, result: CheckpointMetrics) -> None:
        """Give the policy the weights of a checkpoint."""
        policy = self._phases.engines.policy
        if result.path == self._config.model.path:
            check_loaded("policy", policy)
            return
        saved = store.named(result.path)
        self._phases.memory.to_training()
        store.load_weights(saved, {"policy": policy})
        policy.version += 1  # so that the engine takes them
        self._phases.step.progress.line(f"evaluating {result.path}")

    def _without_votes(self, measured: list[CheckpointMetrics]) -> str:
        """Return a line that says why the table has no majority vote, or ""."""
        names = {name for result in measured for name in result.metrics}
        if any("/maj@" in name for name in names) or not any("/best@" in name for name in names):
            return ""
        return "\nno maj@k, because the reward returns no answer: return it as `pred` (docs/extending.md)"

    def _measure(self, name: str, result: CheckpointMetrics) -> None:
        """Measure one pass, and store its samples and metrics."""
        phases = self._phases
        if name != "loss":
            phases.sampler.refit()
        measure(phases, self._held_out, self._config, name, self._log.store_validation)
        known = result.metrics.keys()
        found = {key: value for key, value in phases.metrics.items() if key.startswith(VALIDATION)}
        result.passes[name] = {key: value for key, value in found.items() if key not in known}
        with fail_together():
            if self._results is not None:
                self._log.flush()  # first the samples
                phases.step.fence()
                self._results.write()


def targets(config: Config) -> list[CheckpointMetrics]:
    """Return what is to be measured, oldest first. Not collective. Raises ConfigError if it is absent."""
    if config.checkpoint.resume == "never":
        return [CheckpointMetrics(config.model.path, 0, 0)]
    return [
        CheckpointMetrics(str(each.path), each.step, zlib.crc32((each.path / MANIFEST).read_bytes()))
        for each in checkpoints(config)
    ]


def checkpoints(config: Config) -> list[Saved]:
    """Return the checkpoints that checkpoint.resume names, oldest first. Not collective.

    auto: all of the run; a path: a checkpoint, or all of a run directory. Raises ConfigError for none.
    """
    resume = config.checkpoint.resume
    own = config.run.dir.removesuffix(SUFFIXES["evaluate"])
    directory = Path(own if resume == "auto" else resume)
    if (directory / MANIFEST).exists():
        return [Saved(int(directory.name.removeprefix("step_")), directory)]
    found = complete(directory / "checkpoints")
    if not found and resume == "auto":
        raise ConfigError(
            f"run.dir={own} has no checkpoint to evaluate; correct run.dir or run.name, or set "
            "checkpoint.resume=never to evaluate model.path."
        )
    if not found:
        others = [each.path.name for each in complete(directory.parent)]
        raise ConfigError(
            f"checkpoint.resume={resume} is neither a checkpoint nor the directory of a run with one; "
            + (f"use one of {listed(others, 'or')} there, " if others else "name either, ")
            + "or never to evaluate model.path."
        )
    return found
