"""A layer whose weight may have an addition that learns, such as a low-rank adapter."""

from typing import Protocol

import torch
from torch import Tensor


class Addition(Protocol):
    """An addition to a weight, for example the product B A of a low-rank adapter."""

    def parts(self) -> tuple[Tensor, ...]:
        """Return the tensors of the addition, for example A and B."""

    def merge(self, base: Tensor, *parts: Tensor) -> Tensor:
        """Return the weight with the addition of these parts, with gradients."""


class AdaptedWeight(torch.nn.Module):
    """A layer that computes with the merged weight, for example W + scale * B A, if it has an addition."""

    weight: torch.nn.Parameter
    adapter: Addition | None = None

    def weight_parts(self) -> tuple[Tensor, ...]:
        """Return the arguments of `merged`: W, and the parts of the addition."""
        return (self.weight,) if self.adapter is None else (self.weight, *self.adapter.parts())

    def merged(self, weight: Tensor, *parts: Tensor) -> Tensor:
        """Return the weight of these parts, with gradients."""
        return weight if self.adapter is None else self.adapter.merge(weight, *parts)
