"""The form of a run's dialogues: how the run's samples are generated and become a batch.

A `Sampler` calls `Dialogues` without knowing the form. In this file a sample is a response of one turn. In a
run with environments a sample is a trajectory. For example, the answer to a question has one turn, and a game
has one turn per move.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from rl.config.functions import UsersError
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.phases.sampler import SampleCall
from rl.rollout.batches import batch_of
from rl.rollout.engine import RolloutEngine
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.sampled_group import SampledGroup
from rl.rollout.samples import Sample
from rl.rollout.single_turn import SingleTurn
from rl.rollout.source import SampleSource


class AllTrajectoriesFailed(UsersError):
    """Raised if environments failed so often that no group of a call has enough trajectories."""


class Dialogues:
    """Responses of one turn."""

    is_fixed = False
    """Whether each replica must have a fixed share of the work, also without rollout.deterministic."""
    holds = False
    """Whether a replica holds state of its unfinished samples, such as environments."""

    def run(
        self,
        engine: RolloutEngine,
        schedule: QueueSchedule,
        call: SampleCall,
        *,
        progress: Any = None,
        interrupt: Callable[[], bool] | None = None,
    ) -> bool:
        """Generate the samples of a schedule; return whether the run of the engine was completed.

        Collective over the replica. Afterwards the samples are in `schedule.samples` on the replica's leader.

        Args:
            call: the call, with the prompts of all replicas.
            progress, interrupt: see `SampleSource` and `RolloutEngine.run`.
        """
        sampling = call.sampling
        capacity = engine.capacity(len(call.prompts), sampling.samples_per_prompt)
        source = SampleSource(schedule, SingleTurn(sampling, capacity=capacity), progress=progress)
        return engine.run(source if engine.leads else None, sampling, interrupt=interrupt)

    def batch(self, samples: list[Sample], call: SampleCall, *, counts: Counter[str] | None = None) -> Batch:
        """Return the batch of finished samples. Collective over the world.

        counts: the sums of `Dialogue.counts` over the replicas. None: sums the counts that the last `run`
            left on every rank.
        """
        n = call.sampling.samples_per_prompt
        return batch_of(samples, call.ids, prompts=call.prompts, samples_per_prompt=n)

    def sent(self, prompt: Prompt) -> Prompt:
        """Return the part of a prompt that a generator needs if it has not drawn the prompt."""
        return Prompt.of_tokens(prompt.token_ids)

    def within(self, group: SampledGroup, max_tokens: int) -> SampledGroup:
        """Return a group from an earlier run, cut to the present limit of tokens."""
        return group.within(max_tokens)

    def keep_only(self, samples: Collection[tuple[int, int]]) -> None:
        """Release the state of all unfinished samples except `samples`.

        samples: pairs (number of the prompt's draw, number of the sample).
        """
