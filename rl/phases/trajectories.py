"""Generation of trajectories: samples that environments answer (`agents`)."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from rl.agents.generation import AgentRollouts
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.phases.batch_checks import AllTrajectoriesFailed, describe_failures, warn_of_failures
from rl.phases.batch_metrics import agent_metrics
from rl.phases.generation import Generation
from rl.rollout.batches import batch_of
from rl.rollout.samples import Sample
from rl.rollout.sampling import Sampling
from rl.runtime.collectives import gather_objects


class TrajectoryGeneration(Generation):
    """Generation of trajectories. A group may have fewer samples, or be missing (`Batch.prompts`).

    In validation a failed trajectory is a sample of which `failed` is 1.
    """

    def __init__(self, *args, agents: AgentRollouts):
        super().__init__(*args)
        self._agents = agents
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
        is_validation, counts = timing == "testing", Counter[str]()
        seeds, ids = self._seeds(purpose, len(prompts)), [prompt.token_ids for prompt in prompts]

        def generate(progress, interrupt) -> list[Sample] | None:
            own, found = self._agents.generate(
                self._engine,
                prompts,
                sampling,
                seeds,
                progress=progress,
                interrupt=interrupt,
                on_wait=self._step.watchdog.tracker.wait,
                order=order,
                # Validation is not repeated, so its log is not stored.
                log_name="" if is_validation else f"step_{self._step.number}/{purpose}",
                keeps_failed=is_validation,
            )
            counts.update(found)
            return own

        total = len(ids) * sampling.samples_per_prompt
        samples = self.run(ids, generate, total=total, timing=timing)
        batch = batch_of(samples, ids, prompts=prompts, turns=True)
        return self._complete_groups(batch, sampling, counts, timing)

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
