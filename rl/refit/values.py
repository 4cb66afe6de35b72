"""The values that a refit gives to the engine, from the trainer's weights and low-rank adapters.

With `adapter.in_engine=merged` they are those of W + scale * B A, computed in float32 and rounded once, one
weight at a time when it is read. With `adapter` they are W, which travels once, and A and scale * B.

In the merged form whole merged weights travel, not A and B to a receiver that adds scale * B A to its own W.
A receiver that keeps W holds the weights twice. One that does not must subtract the delta of the step before,
and its rounding errors add up (docs/adapters.md). The form with few bytes is `adapter`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.models.boxes import index
from rl.models.layout import Weight
from rl.training.adapter import Adapters
from rl.training.engine import TrainingEngine
from rl.training.weights import WeightMap, full_weights

COMPARED_ROWS = 1024
"""Approximate maximum number of rows of a weight that `wrong_adapter` computes again."""
SUM_ERROR = 2.0**-10
"""Maximum relative error of the products of a float32 matrix product, which a GPU may round to TF32."""


@dataclass(frozen=True)
class Values:
    """The values of a model's weights, or of its adapters."""

    weight_map: WeightMap
    of: Callable[[Weight, Tensor], Tensor] = lambda weight, parameter: parameter
    """Computes the value of a weight from this rank's parameter, of the same shape and dtype."""
    is_adapter: bool = False

    def by_number(self, weights: Sequence[Weight]) -> Mapping[int, Tensor]:
        """Return what this rank's parameters give for these weights, by their place in the list."""
        numbers = {weight.hf: number for number, weight in enumerate(weights)}
        local = ((w, p.detach()) for w, p in self.weight_map.local() if w.hf in numbers)
        return _Computed({numbers[w.hf]: functools.partial(self.of, w, p) for w, p in local})

    def gathered(self, weights: Sequence[Weight]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of the given weights, on every rank.

        Collective over the model parallel groups, as `full_weights`.
        """
        return full_weights(self.weight_map.over(list(weights), self.weight_map.parameters), self.of)


@dataclass(frozen=True)
class Group:
    """Weights that are written and compared together."""

    number: int
    """Distinguishes the groups of one weight map; 0: the weights that stay in the trainer's dtype."""
    weights: list[Weight]
    values: Values
    held: Mapping[str, Tensor]
    """Tensors that receive the values, or are compared with them, by vLLM's name."""
    store: Callable[[], list[str]] = list
    """Gives what has arrived to the engine, if `held` only stages it; returns messages about what has not."""


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
        return [Values(trainer.parts.served_map(trainer.weight_map), trainer.parts.merging())]
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


@torch.no_grad()
def wrong_adapter(trainer: TrainingEngine, values: Values, number: int) -> str:
    """Return what is wrong with the values of a layer with an adapter on this rank; "" if nothing.

    The engine's weights are compared with these values, so an adapter with a wrong scale, or that is left
    out, would be on both sides. One layer, chosen by `number`, is computed again from the parameters and
    their places in the whole tensors. Each element must be W + scale * B A, or scale * B, up to rounding:
    half the distance of two numbers of the dtype, and the errors of the float32 sums. DoRA's layers are not
    compared. Not collective.
    """
    adapters, base = trainer.parts.get(Adapters), trainer.weight_map
    pairs = (
        [pair for pair in adapters.pairs if base.holds(pair.base) and pair.magnitude is None]
        if adapters
        else []
    )
    if adapters is None or not pairs:
        return ""
    pair, scale, learned = pairs[number % len(pairs)], adapters.config.scale, adapters.learned_map
    a, b = (_whole(learned, weight) for weight in (pair.a, pair.b))
    weights, weight = (learned, pair.b) if values.is_adapter else (base, pair.base)
    parameter = weights.parameter(weight).detach()
    value = values.of(weight, parameter)
    start = torch.zeros_like(parameter) if values.is_adapter else trainer.parts.value(weight, parameter)
    for piece in weights.pieces(weight):
        if piece.hf != (weight.hf[0] if values.is_adapter else weight.hf[pair.part]):
            continue
        (first, last), columns = piece.hf_box[0], slice(*piece.hf_box[1])
        step = -(-(last - first) // COMPARED_ROWS)
        found, before = (tensor[index(piece.local_box)][::step].float() for tensor in (value, start))
        rows = b[first:last:step]
        added, size = (
            (rows, rows.abs())
            if values.is_adapter
            else (rows @ a[:, columns], rows.abs() @ a[:, columns].abs())
        )
        expected = before + scale * added
        allowed = 0.51 * torch.finfo(value.dtype).eps * expected.abs() + SUM_ERROR * scale * size
        if bool(((found - expected).abs() > allowed).any()):
            along = float(((found - before) * added).sum() / (scale * added.square().sum()).clamp(min=1e-30))
            return (
                f"the values of {pair.module} for the engine contain {along:.2f} times its adapter, "
                f"scale * B A with the scale {scale:g}, instead of once"
            )
    return ""


def _whole(weights: WeightMap, weight: Weight) -> Tensor:
    """Return a tensor with zeros where this rank has no part of it, float32."""
    parameter = weights.parameter(weight).detach()
    full = torch.zeros(weight.shapes[0], device=parameter.device)
    for piece in weights.pieces(weight):
        full[index(piece.hf_box)] = parameter[index(piece.local_box)].float()
    return full
