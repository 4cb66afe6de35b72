"""Interface of a step to the teachers: models from which the policy learns token by token."""

from typing import Protocol

from rl.data.batch import Batch
from rl.data.prompts import Prompt


class Teachers(Protocol):
    """The teachers of a run. Methods are collective over the world."""

    def log_probs(self, batch: Batch) -> None:
        """Fill `teacher_logprobs`, the log-prob of each token under its teacher.

        Does so only if `teacher.advantage_coef` is set.
        """

    def add_to_advantages(self, batch: Batch) -> None:
        """Add the term computed from `teacher_logprobs`, if this column is filled, to the advantages."""

    def distributions(self, batch: Batch) -> None:
        """Give the policy the teacher's distribution at each response token.

        The teacher is the one of the sample's source.
        """

    def responses(self, prompts: list[Prompt]) -> Batch:
        """Return rollout.samples_per_prompt responses of the teacher to each prompt."""
