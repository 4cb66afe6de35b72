"""Extras of a packed micro-batch: objects of optional features, found by their class.

The trunk reads an object only through the classes of this file. For example, with rollout.top_p a part of the
engine adds sampling masks; the head asks for a `LogitsFilter` and does not know where it comes from. A part
finds its own object again by its own class.

R: response tokens of a micro-batch. r: response tokens that this rank predicts; r < R with context
parallelism.
"""

from abc import ABC, abstractmethod
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Extras:
    """Objects of different classes; never changed in place, because several micro-batches may share them."""

    def __init__(self, *values: object):
        self._values = values

    def get(self, kind: type[T]) -> T | None:
        """Return the object of this class or of a subclass; None if there is none."""
        return next((value for value in self._values if isinstance(value, kind)), None)

    def plus(self, value: object) -> "Extras":
        """Return these objects and `value`, which replaces the object of the same class."""
        return Extras(*self.without(type(value))._values, value)

    def without(self, kind: type) -> "Extras":
        """Return the objects of other classes."""
        return Extras(*(value for value in self._values if not isinstance(value, kind)))

    def of(self, index: Tensor) -> "Extras":
        """Return the objects for the response tokens `index`, as `PerToken.of`."""
        return Extras(*(value.of(index) if isinstance(value, PerToken) else value for value in self._values))


class PerToken(ABC):
    """An object with something for each response token."""

    @abstractmethod
    def of(self, index: Tensor) -> Self:
        """Return the object of the tokens `index`, int64 [r], ascending, on the CPU, of R response tokens."""


class RowFilter(Protocol):
    """A `LogitsFilter` on one rank's rows of the head."""

    def restrict(self, logits: Tensor, part: slice) -> None:
        """Lower the logits [c, rows] of excluded tokens to FLOOR at the positions in `part`, in place."""


class LogitsFilter(PerToken):
    """Excludes tokens from the distribution at each response token, for example all outside of top_p."""

    @abstractmethod
    def on_rows(self, first: int, rows: int, device: torch.device) -> RowFilter:
        """Return the filter of the rows first to first + rows - 1 of the head."""


class HeadOutput(PerToken):
    """One more output of a policy's head, for example the divergence from another distribution."""

    name: str
    """Name by which passes request the output and `MicroBatch.outputs` holds it."""

    @abstractmethod
    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        *,
        temperature: float,
        vocab_size: int,
        group: torch.distributed.ProcessGroup,
        chunk: int,
    ) -> Tensor:
        """Return the output at each token, float32 [R]; arguments as for `logprobs.linear_logprobs`."""
