"""Generation of trajectories: samples that environments answer (`agents`)."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from rl.agents.dialogue import Trajectories
from rl.agents.replica_environments import Environments
from rl.checks.batches import AllTrajectoriesFailed, describe_failures, warn_of_failures
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.phases.batch_metrics import agent_metrics
from rl.phases.generation import Generation
from rl.rollout.batches import batch_of
from rl.rollout.queue import OrderedQueue, Queue, StaticQueue
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.samples import Sample
from rl.rollout.sampling import Sampling
from rl.rollout.source import SampleSource
from rl.rollout.stored_log import DIRECTORY, Recorder, store
from rl.runtime.collectives import gather_objects


class TrajectoryGeneration(Generation):
    """Generation of trajectories. A group may have fewer samples, or be missing (`Batch.prompts`).

    In validation a failed trajectory is a sample of which `failed` is 1.
    """

    def __init__(self, *args, environments: Environments | None):
        """environments: see `start_environments`."""
        super().__init__(*args)
        self._environments = environments
        self._counts: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)
        """Counts of environments in this step, by its number and the timing of the calls."""

    def sample(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        *,
        purpose: str,
        timing: str = "gen",
        order: Sequence[int] | None = None,
    ) -> Batch:
        """Sample trajectories, as `Sampler.sample`.

        Raises AllTrajectoriesFailed on every rank if environments failed for every group.
        """
        counts, on_wait = Counter[str](), self._step.watchdog.tracker.wait
        seeds, ids = self._seeds(purpose, len(prompts)), [prompt.token_ids for prompt in prompts]

        def generate(progress, interrupt) -> list[Sample] | None:
            engine = self._engine
            queue = self._queue(len(prompts), order)
            engine.llm.reset_prefix_cache()  # what the engine computes then depends on the events alone
            if self._environments is None:
                return [] if engine.run(None, sampling, interrupt=interrupt, on_wait=on_wait) else None
            schedule = QueueSchedule(prompts, sampling, seeds, queue=queue)
            dialogue = Trajectories(
                self._environments,
                sampling,
                capacity=engine.capacity(len(prompts), sampling.samples_per_prompt),
                max_context=self._config.data.max_prompt_tokens + sampling.max_tokens,
                keeps_failed=timing == "testing",
            )
            recorder = Recorder(SampleSource(schedule, dialogue, progress=progress))
            try:
                is_complete = engine.run(recorder, sampling, interrupt=interrupt, on_wait=on_wait)
            except BaseException:
                dialogue.close()
                # Waits: the workers end with this process, and environments may have much to close.
                self._environments.close()
                raise
            dialogue.close()
            counts.update(dialogue.counts)
            if is_complete and timing != "testing" and self._config.agents.order == "arrival":
                name = f"step_{self._step.number}/{purpose}_replica_{engine.replica}.events"
                path = Path(self._config.run.dir, DIRECTORY, name)
                store(path, sampling, engine.events, recorder.completions)  # no validation is repeated
            return schedule.samples if is_complete else None

        total = len(ids) * sampling.samples_per_prompt
        samples = self.run(ids, generate, total=total, timing=timing)
        batch = batch_of(samples, ids, prompts=prompts, turns=True)
        return self._complete_groups(batch, sampling, counts, timing)

    def _queue(self, num_prompts: int, order: Sequence[int] | None) -> Queue:
        """Return the work of a call. In waves nothing may depend on which replica is faster."""
        engine = self._engine
        if self._config.agents.order == "waves":
            ranks = dict(replica=engine.replica, num_replicas=engine.num_replicas)
            queue: Queue = StaticQueue(num_prompts, **ranks)
        else:
            queue = engine.queue(num_prompts)
        return queue if order is None else OrderedQueue(queue, order)

    def _complete_groups(self, batch: Batch, sampling: Sampling, counts: Counter[str], timing: str) -> Batch:
        """Return the groups that can be learned from, and log what the environments did.

        A group loses the trajectories whose environments failed, and is dropped if a single one is left of
        several. Collective over the world. counts: this rank's, by name.
        """
        total: Counter[str] = sum(map(Counter, gather_objects(dict(counts))), Counter())
        ended = total["trajectories"] + total["dropped"]
        expected = len(batch.prompts) * sampling.samples_per_prompt
        assert ended == expected, f"{ended} of {expected} trajectories have ended"
        sizes = torch.bincount(batch.merge_rows().groups, minlength=len(batch.prompts))
        kept = (sizes >= min(2, sampling.samples_per_prompt)).nonzero().squeeze(1).tolist()
        total["dropped_groups"] = len(batch.prompts) - len(kept)
        key = self._step.number, timing
        self._counts = defaultdict(Counter, {k: v for k, v in self._counts.items() if k[0] == key[0]})
        self._counts[key].update(total)  # a step may have several calls
        found = agent_metrics(self._counts[key], capacity=self._config.rollout.max_concurrent_samples)
        prefix = "" if timing == "gen" else "val-aux/"
        self._step.metrics |= {f"{prefix}{name}": value for name, value in found.items()}
        if warning := warn_of_failures(total, counts_as_wrong=timing == "testing"):
            self._step.progress.line(warning)
        if not kept:
            raise AllTrajectoriesFailed(
                f"environments failed in every group of {len(batch.prompts)} prompts: "
                f"{describe_failures(total)}; the log has the reason of each failure."
            )
        return batch if len(kept) == len(batch.prompts) else batch.keep_groups(kept)
