"""The values that a refit gives to the engine, from the trainer's weights and low-rank adapters.

With `adapter.in_engine=merged` they are those of W + scale * B A, computed in float32 and rounded once, one
weight at a time when it is read. With `adapter` they are W, which travels once, and A and scale * B.

In the merged form whole merged weights travel, not A and B to a receiver that adds scale * B A to its own W.
A receiver that keeps W holds the weights twice. One that does not must subtract the delta of the step before,
and its rounding errors add up (docs/adapters.md). The form with few bytes is `adapter`.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl.models.layout import Weight
from rl.training.adapter import Adapters
from rl.training.engine import TrainingEngine
from rl.training.weights import WeightMap, full_weights


@dataclass(frozen=True)
class Values:
    """The values of a model's weights, or of its adapters."""

    weight_map: WeightMap
    of: Callable[[Weight, Tensor], Tensor] = lambda weight, parameter: parameter
    """Computes the value of a weight from this rank's parameter, of the same shape and dtype."""
    is_adapter: bool = False

    def by_number(self, numbers: Mapping[tuple[str, ...], int]) -> Mapping[int, Tensor]:
        """Return this rank's values by number. numbers: by the weights' Hugging Face names."""
        local = ((w, p.detach()) for w, p in self.weight_map.local() if w.hf in numbers)
        return _Computed({numbers[w.hf]: functools.partial(self.of, w, p) for w, p in local})

    def gathered(self, weights: Sequence[Weight]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of the given weights, on every rank.

        Collective over the model parallel groups, as `full_weights`.
        """
        some = copy.copy(self.weight_map)
        some.weights = list(weights)
        return full_weights(some, self.of)


class _Computed(Mapping[int, Tensor]):
    """Tensors that are computed on access. Only the last one is cached, so that one at a time exists."""

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
        return [Values(trainer.weight_map, trainer.parts.merging())]
    adapters = trainer.parts.get(Adapters)
    assert adapters is not None, "the engine has adapters, but not the trainer"
    scaled = functools.partial(_scaled, adapters.config.scale)
    return [
        Values(trainer.weight_map, trainer.parts.value),
        Values(adapters.learned_map, scaled, is_adapter=True),
    ]


def _scaled(scale: float, weight: Weight, parameter: Tensor) -> Tensor:
    """Return A, or scale * B."""
    return parameter * scale if ".lora_B." in weight.megatron else parameter
