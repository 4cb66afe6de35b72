"""Generates the trajectories of a step: samples whose turns an environment answers (config section
`agents`)."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.features.agents.dialogue import trajectories
from rl.features.agents.replica_environments import Environments
from rl.features.agents.stored_log import CompletionRecorder, store
from rl.phases.batch_metrics import agent_metrics
from rl.phases.dialogues import AllTrajectoriesFailed, Dialogues
from rl.phases.sampler import SampleCall
from rl.phases.step_record import StepRecord
from rl.rollout.batches import batch_of
from rl.rollout.engine import RolloutEngine
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.sampled_group import SampledGroup
from rl.rollout.samples import Sample
from rl.rollout.source import SampleSource
from rl.run_directory.event_files import DIRECTORY
from rl.runtime.collectives import gather_objects

MAX_FAILED_SHARE = 0.05
"""Share of failed trajectories in one call of the engine above which a warning is logged."""


class TrajectoryDialogues(Dialogues):
    """Generates trajectories. After failures, a group may have fewer samples or be missing (`Batch.prompts`).

    In validation, a failed trajectory is kept as a sample with `failed` 1.

    Args:
        environments: see `start_environments`.
    """

    def __init__(self, config: Config, step: StepRecord, environments: Environments | None):
        self._config, self._step, self._environments = config, step, environments
        self.is_fixed = config.agents.order == "waves"
        self.holds = True
        self._own_counts = Counter[str]()
        """Counts of this rank's environments since the last batch with metrics."""
        self._first_failure = ""
        """Reason of the first failed trajectory of the last call on this rank."""
        self._counts: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)
        """(number of the step, timing of the calls) -> counts of environments in this step."""

    def run(
        self,
        engine: RolloutEngine,
        schedule: QueueSchedule,
        call: SampleCall,
        *,
        progress: Any = None,
        interrupt: Callable[[], bool] | None = None,
    ) -> bool:
        self._own_counts, sampling, is_test = Counter(), call.sampling, call.timing == "testing"
        engine_options: dict = dict(interrupt=interrupt, on_wait=self._step.watchdog.tracker.wait)
        if not engine.keeps_cache:
            engine.llm.reset_prefix_cache()  # the results then depend on the events alone
        if self._environments is None:
            return engine.run(None, sampling, **engine_options)
        dialogue = trajectories(
            self._config,
            self._environments,
            sampling,
            capacity=engine.capacity(len(call.prompts), sampling.samples_per_prompt),
            keeps_failed=is_test,
        )
        source = SampleSource(schedule, dialogue, progress=progress)
        recorder = CompletionRecorder(source)
        try:
            is_complete = engine.run(recorder, sampling, **engine_options)
        except BaseException:
            dialogue.close()
            # This waits for the environments to close. Some have much to close, and the workers end with this
            # process.
            self._environments.close()
            raise
        if is_complete:
            source.suspend()
        else:
            dialogue.close()
        self._own_counts, self._first_failure = dialogue.counts, dialogue.first_failure
        if is_complete and not is_test and self._config.agents.order == "arrival":
            name = f"step_{self._step.number}/{call.purpose}_replica_{engine.replica}.events"
            path = Path(self._config.run.dir, DIRECTORY, name)
            is_async = engine.config.async_scheduling
            # Validation is never repeated from a log.
            store(path, sampling, engine.events.records, recorder.completions, is_async)
        return is_complete

    def sent(self, prompt: Prompt) -> Prompt:
        return replace(prompt, response_ids=None, response_mask=None)

    def within(self, group: SampledGroup, max_tokens: int) -> SampledGroup:
        return group.restarted(max_tokens)  # the environment has seen all tokens

    def keep_only(self, samples: Collection[tuple[int, int]]) -> None:
        if self._environments is not None:
            self._environments.keep_only(samples)

    def batch(self, samples: list[Sample], call: SampleCall, *, counts: Counter[str] | None = None) -> Batch:
        """Return the groups that can be learned from, and log what the environments did.

        A group loses the trajectories whose environments failed. If only one of several trajectories is left,
        the group is dropped. For example, a group of 8 trajectories with 7 failures is dropped. Collective
        over the world.

        Raises AllTrajectoriesFailed on every rank if environments failed for every group.
        """
        n, timing = call.sampling.samples_per_prompt, call.timing
        batch = batch_of(samples, call.ids, prompts=call.prompts, samples_per_prompt=n, turns=True)
        cause = ""
        if counts is None:
            found = gather_objects((dict(self._own_counts), self._first_failure))
            counts = sum((Counter(own) for own, _ in found), Counter[str]())
            cause = next((reason for _, reason in found if reason), "")
            self._own_counts = Counter()  # the next batch may need no run of the engine
        sizes = torch.bincount(batch.merge_rows().groups, minlength=len(batch.prompts))
        kept = (sizes >= min(2, n)).nonzero().squeeze(1).tolist()
        counts["dropped_groups"] = len(batch.prompts) - len(kept)
        key = self._step.number, timing
        self._counts = defaultdict(Counter, {k: v for k, v in self._counts.items() if k[0] == key[0]})
        self._counts[key].update(counts)  # a step may have several calls
        logged = agent_metrics(self._counts[key], capacity=self._config.rollout.max_concurrent_samples)
        prefix = "" if timing == "gen" else "val-aux/"
        self._step.metrics |= {f"{prefix}{name}": value for name, value in logged.items()}
        if warning := warn_of_failures(counts, counts_as_wrong=timing == "testing"):
            self._step.progress.line(warning)
        if not kept:
            reason = f"first cause: {cause}" if cause else "the log has the reason of each failure"
            raise AllTrajectoriesFailed(
                f"environments failed in every group of {len(batch.prompts)} prompts "
                f"({describe_failures(counts)}); {reason}."
            )
        return batch if len(kept) == len(batch.prompts) else batch.keep_groups(kept)


def describe_failures(counts: Counter[str]) -> str:
    """Return text such as 'error 3, time 1': the number of failed trajectories by cause."""
    found = {name.removeprefix("failures/"): n for name, n in counts.items() if name.startswith("failures/")}
    return ", ".join(f"{cause} {number}" for cause, number in sorted(found.items()))


def warn_of_failures(counts: Counter[str], *, counts_as_wrong: bool) -> str:
    """Return a warning if more than MAX_FAILED_SHARE of a call's trajectories failed; "" otherwise.

    counts: as in `describe_failures`. A trajectory that failed and was sampled again counts twice.
    """
    failed = sum(number for name, number in counts.items() if name.startswith("failures/"))
    total = failed + counts["succeeded"]
    if failed <= MAX_FAILED_SHARE * total:
        return ""
    effect = "count as wrong" if counts_as_wrong else "are treated according to agents.on_failure"
    return (
        f"warning: {failed} of {total} trajectories ({failed / total:.0%}) failed "
        f"({describe_failures(counts)}) and {effect}. An environment that fails because of what the policy "
        "does biases the run; the log has the reasons."
    )
