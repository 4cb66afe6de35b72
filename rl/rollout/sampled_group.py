"""A group of samples that may be unfinished: for example, the end of a step interrupted three of eight.

Carry-over and roles keep such groups in checkpoints.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from rl.data.prompts import Prompt
from rl.rollout.samples import Sample


@dataclass(frozen=True)
class SampledGroup:
    """The samples of a prompt so far."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    """Their rows, ordered by number and row."""
    holder: int = -1
    """Rank that generated the group's last tokens; -1: none. Its replica may still hold environments."""

    @classmethod
    def of(cls, prompt: Prompt, num_samples: int) -> "SampledGroup":
        """Return a group of samples that have not been started."""
        return cls(prompt, tuple(Sample(0, number, (), "abort") for number in range(num_samples)))

    def within(self, max_tokens: int) -> "SampledGroup":
        """Return the group as a generation with this limit of tokens would have left it."""
        return replace(self, samples=tuple(sample.within(max_tokens) for sample in self.samples))

    def restarted(self, max_tokens: int) -> "SampledGroup":
        """Return the group without the tokens of samples that have more than `max_tokens` in all rows."""
        lengths = Counter[int]()
        for sample in self.samples:
            lengths[sample.number] += len(sample.token_ids)
        rows = [s for s in self.samples if lengths[s.number] <= max_tokens or s.row == 0]
        new = [s if lengths[s.number] <= max_tokens else Sample(0, s.number, (), "abort") for s in rows]
        return replace(self, samples=tuple(new))

    @property
    def unfinished(self) -> list[int]:
        """Numbers of the unfinished samples."""
        return sorted({sample.number for sample in self.samples if sample.is_unfinished})

    @property
    def oldest(self) -> float:
        """Version of the weights that sampled the oldest token; infinite without tokens."""
        versions = (sample.weight_versions for sample in self.samples)
        return min((int(own.min()) for own in versions if len(own)), default=np.inf)
