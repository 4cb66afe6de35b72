"""Interface of a step to the teachers: models from which the policy learns token by token."""

from typing import Protocol

from rl.data.batch import Batch
from rl.data.prompts import Prompt


class Teachers(Protocol):
    """The teachers of a run. Methods are collective over the world."""

    def log_probs(self, batch: Batch) -> None:
        """Fill `teacher_logprobs` with `teacher.advantage_coef`: log-prob of each token by its teacher."""

    def add_to_advantages(self, batch: Batch) -> None:
        """Add the part of `teacher_logprobs`, if they are filled, to the advantages."""

    def distributions(self, batch: Batch) -> None:
        """Give the policy the distribution of each response token by the teacher of the sample's source."""

    def responses(self, prompts: list[Prompt]) -> Batch:
        """Return rollout.samples_per_prompt responses of the teacher to each prompt."""
