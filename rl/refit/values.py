"""The values that a refit gives to the engine, from the trainer's weights and low-rank adapters.

With `adapter.in_engine=merged` the values are W + scale * B A, computed in float32 and rounded once. One
weight at a time is computed, when the refit reads it. With `adapter.in_engine=adapter` the values are W,
which is sent only once, and A and scale * B.

With `merged`, the refit sends whole merged weights. It could instead send A and B, and the receiver could add
scale * B A to its own W. But a receiver that keeps W holds the weights twice. A receiver without W must
subtract the delta of the step before, and the rounding errors add up (docs/adapters.md). The form that sends
few bytes is `adapter`.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl.models.layout import Weight
from rl.rollout.engine import RolloutEngine
from rl.training.engine import TrainingEngine
from rl.training.weights import WeightMap, full_weights


@dataclass(frozen=True)
class Values:
    """The values of a model's weights, or of adapters beside them."""

    weight_map: WeightMap
    of: Callable[[Weight, Tensor], Tensor] = lambda weight, parameter: parameter
    """Computes the value of a weight from this rank's parameter, of the same shape and dtype."""
    is_beside: bool = False
    """Whether the engine holds the weights beside the model's, for example an adapter's."""

    def by_number(self, weights: Sequence[Weight]) -> Mapping[int, Tensor]:
        """Return the values of these weights from this rank's parameters, by their index in the list."""
        numbers = {weight.hf: number for number, weight in enumerate(weights)}
        local = ((w, p.detach()) for w, p in self.weight_map.local() if w.hf in numbers)
        return _Computed({numbers[w.hf]: functools.partial(self.of, w, p) for w, p in local})

    def gathered(self, weights: Sequence[Weight]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of the given weights, on every rank.

        Collective over the model parallel groups, as `full_weights`.
        """
        return full_weights(self.weight_map.over(list(weights), self.weight_map.parameters), self.of)


@dataclass(frozen=True)
class WeightGroup:
    """Weights that are written and compared together."""

    number: int
    """Distinguishes the groups of one weight map; 0: the weights that stay in the trainer's dtype."""
    weights: list[Weight]
    values: Values
    held: Mapping[str, Tensor]
    """Tensors that receive the values, or are compared with them, by vLLM's name."""
    store: Callable[[], list[str]] = list
    """Passes the values on to the engine, if `held` only stages them. Returns a message for each tensor with
    values that did not arrive."""


class Groups(ABC):
    """A part of an engine that receives refits in groups of its own, for example to quantise each group."""

    @abstractmethod
    def groups(self, engine: RolloutEngine, values: Values, *, staged: bool) -> Iterator[WeightGroup]:
        """Yield the groups of the engine's weights, identical on all ranks. Not collective.

        staged: yield tensors that a refit writes; otherwise the values that the engine holds.
        """


class _Computed(Mapping[int, Tensor]):
    """Tensors that are computed on access. Only the last tensor is cached, so only one exists at a time."""

    def __init__(self, compute: Mapping[int, Callable[[], Tensor]]):
        self._compute = compute
        self._last: tuple[int, Tensor] | None = None

    def __getitem__(self, number: int) -> Tensor:
        if self._last is None or self._last[0] != number:
            self._last = None  # free it first
            self._last = number, self._compute[number]()
        return self._last[1]

    def __iter__(self) -> Iterator[int]:
        return iter(self._compute)

    def __len__(self) -> int:
        return len(self._compute)


def values_of(trainer: TrainingEngine, *, in_parts: bool = False) -> list[Values]:
    """Return the values that an engine holds: the weights, with the adapters in them.

    in_parts: for an engine that holds adapters beside the weights, return both. Collective over the trainer's
    tensor parallel groups.
    """
    if not in_parts:
        return [Values(trainer.parts.served_map(trainer.weight_map), trainer.parts.merging())]
    beside = [found for part in trainer.parts if (found := part.beside()) is not None]
    assert beside, "the engine has adapters, but not the trainer"
    return [
        Values(trainer.weight_map, trainer.parts.value),
        *(Values(*own, is_beside=True) for own in beside),
    ]


def wrong_values(trainer: TrainingEngine, values: Values) -> str:
    """Return a message about the first error in the values of weights; "" if the values are right.

    Other checks compare the engine's weights with these same values. They cannot find an error in the values
    themselves, for example an adapter that is left out. The trainer's parts therefore compute some of the
    values a second time here. Not collective.
    """
    own = values.of, trainer.version
    found = (part.wrong_values(trainer, *own, is_beside=values.is_beside) for part in trainer.parts)
    return next(filter(None, found), "")
