"""Extras of a packed micro-batch: objects of optional features, found by their class.

Code outside of the features reads an object only through the classes of this file. For example, with
rollout.top_p a part of the training engine adds sampling masks to a micro-batch. The model's head asks the
micro-batch for a `LogitsFilter` and does not know which feature added it. The feature itself finds its object
by the object's own class.

R: response tokens of a micro-batch. r: response tokens that this rank predicts; r < R with context
parallelism.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rl.training.logprobs import Softmax

T = TypeVar("T")


class Extras:
    """Objects of different classes; never changed in place, because micro-batches may share them."""

    def __init__(self, *values: object):
        self._values = values

    def get(self, kind: type[T]) -> T | None:
        """Return the object of this class or of a subclass; None if there is none."""
        return next((value for value in self._values if isinstance(value, kind)), None)

    def plus(self, value: object) -> "Extras":
        """Return new extras with `value`, which replaces an object of the same class."""
        return Extras(*self.without(type(value))._values, value)

    def without(self, kind: type) -> "Extras":
        """Return new extras without the objects of this class."""
        return Extras(*(value for value in self._values if not isinstance(value, kind)))

    def of(self, index: Tensor) -> "Extras":
        """Return new extras for some of the response tokens; index: as for `PerToken.of`."""
        return Extras(*(value.of(index) if isinstance(value, PerToken) else value for value in self._values))


class PerToken(ABC):
    """An object with something for each response token."""

    @abstractmethod
    def of(self, index: Tensor) -> Self:
        """Return the object for some of the R response tokens.

        index: their numbers among the R response tokens, int64 [r], ascending, on the CPU.
        """


class RowFilter(Protocol):
    """A `LogitsFilter` for one rank's rows of the head; each row belongs to one token of the vocabulary."""

    def restrict(self, logits: Tensor, part: slice) -> None:
        """Set the logits of excluded tokens to `logprobs.FLOOR`, in place.

        logits: [c, rows]. part: the c response tokens to which the logits belong.
        """


class LogitsFilter(PerToken):
    """Excludes tokens from the distribution at each response token, for example all outside of top_p."""

    @abstractmethod
    def on_rows(self, first: int, rows: int, device: torch.device) -> RowFilter:
        """Return the filter for the head's rows from `first` to `first + rows - 1`."""


class HeadOutput(PerToken):
    """One more output of a policy's head, for example the divergence from another distribution."""

    name: str
    """Name by which passes request the output and `MicroBatch.outputs` holds it."""

    @abstractmethod
    def __call__(self, hidden: Tensor, weight: Tensor, softmax: "Softmax") -> Tensor:
        """Return the output at each token, float32 [R]; other arguments: see `Softmax`."""
