"""A loss: a function of one micro-batch and of its mini-batch's denominators, with its properties.

For example, `Loss(function, reads=("logprobs",))` lets the model skip the entropy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rl.data.batch import Batch
from rl.training.packing import MicroBatch


@dataclass(frozen=True)
class Totals:
    """Denominators of a mini-batch, over all ranks and micro-batches. Each is at least 1."""

    num_tokens: float
    """Number of response tokens with mask 1."""
    num_samples: float
    """Number of samples with at least one token with mask 1."""
    num_units: float
    """Number of units (`Batch.samples_per_unit`, for example pairs) with at least one token with mask 1 in
    every sample."""


LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, totals) -> (loss, metrics), both divided by the totals, so that micro-batches add up."""


@dataclass(frozen=True)
class Loss:
    """A loss function with its properties."""

    function: LossFunction
    reads: tuple[str, ...] | None = None
    """Names of the model's outputs that the function reads; the model computes no others. None: all."""
    check: Callable[[], None] | None = None
    """Raises CheckFailed if the gradient does not follow from the formula. The run calls it once per
    start."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""

    @classmethod
    def of(cls, loss: "Loss | LossFunction") -> "Loss":
        """Return a Loss unchanged; make a plain function a Loss that reads all outputs."""
        return loss if isinstance(loss, cls) else cls(loss)

    def __call__(self, micro: MicroBatch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        return self.function(micro, totals, **self.defaults)

    def given(self, **values: Any) -> "Loss":
        """Return a copy of the loss with these keyword arguments added to `defaults`."""
        return replace(self, defaults={**self.defaults, **values})


SelectionFunction = Callable[[Batch, Tensor, int], Tensor]
"""(mini-batch, output of the model [T] under the current weights, seed) -> 1 for selected tokens, else 0,
[T]."""


@dataclass(frozen=True)
class TokenSelection:
    """Selects the tokens of a mini-batch that a loss treats differently."""

    function: SelectionFunction
    reads: str = "logprobs"
    """Name of the model's output that the function gets."""
