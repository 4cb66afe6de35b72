"""The type of a loss: a function of one micro-batch and of its mini-batch's denominators."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rl.training.packing import MicroBatch


@dataclass(frozen=True)
class Totals:
    """Denominators of a mini-batch, over all ranks and micro-batches. Each is at least 1."""

    num_tokens: float
    """Number of response tokens with mask 1."""
    num_samples: float
    """Number of samples with at least one such token."""
    num_units: float
    """Number of units (`Batch.samples_per_unit`, such as pairs) whose samples all have such a token."""


Loss = Callable[[MicroBatch, Totals], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, totals) -> (loss, metrics), both divided by the totals, so that micro-batches add up.

A loss may have the attribute `reads`: names of the model's outputs that it reads. The model then computes
only these."""
