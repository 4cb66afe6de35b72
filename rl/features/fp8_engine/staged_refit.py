"""Refits of an engine with weights in FP8 (`rl.features.fp8_engine.weights`).

The quantised weights move in a few groups of whole layers, each with a plan of its own, so that only one
group's staging tensors exist at a time. The trainer's bfloat16 values travel into these tensors. When a group
has arrived, the engine quantises it. For the checks the trainer quantises its own part of each weight and
dequantises it; the engine dequantises what it holds. Both are bitwise equal, because every rank holds whole
blocks (`rl.config.layout_checks`).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rl.config.adapter import Adapter
from rl.config.schema import Config
from rl.features.fp8_engine.weights import Fp8Weights
from rl.models import fp8_blocks
from rl.models.boxes import index, relative, whole
from rl.models.layout import Piece, Weight
from rl.models.placement import TrainingPlacement
from rl.refit.values import Groups, Values, WeightGroup
from rl.rollout.engine import RolloutEngine
from rl.rollout.parts import EnginePart


class GroupedFp8Weights(Fp8Weights, Groups):
    """Weights in FP8 that refits write, in groups of whole layers."""

    def groups(self, engine: RolloutEngine, values: Values, *, staged: bool) -> Iterator[WeightGroup]:
        """Yield the groups. staged: yield staging tensors; otherwise the dequantised values."""
        weight_map, names = values.weight_map, set(self.names)
        plain = [weight for weight in weight_map.weights if weight.vllm not in names]
        yield WeightGroup(0, plain, values, engine.weights())
        own = values if staged else replace(values, of=partial(_quantised, values))
        quantised = [weight for weight in weight_map.weights if weight.vllm in names]
        for number, weights in enumerate(_by_layers(quantised, weight_map.placement), 1):
            if staged:
                held = self.staging(weights, weight_map.dtype)
                yield WeightGroup(number, weights, own, held, partial(self.store, held))
            else:
                yield WeightGroup(number, weights, own, self.values(weights, weight_map.dtype))


def _by_layers(weights: Sequence[Weight], training: TrainingPlacement) -> list[list[Weight]]:
    """Return the groups: layers at about the same place in each pipeline stage, so that all stages send."""
    stages: dict[int, set[int]] = defaultdict(set)
    for weight in weights:
        stages[training.place(weight).stages[0]].add(weight.layer or 0)
    group_of = {
        layer: place * fp8_blocks.REFIT_GROUPS // len(layers)
        for layers in stages.values()
        for place, layer in enumerate(sorted(layers))
    }
    out: dict[int, list[Weight]] = defaultdict(list)
    for weight in weights:
        out[group_of[weight.layer or 0]].append(weight)
    return [out[group] for group in sorted(out)]


@torch.no_grad()
def _quantised(values: Values, weight: Weight, parameter: Tensor) -> Tensor:
    """Return the values of a quantised weight, as the engine has them, from the trainer's parameter."""
    return in_blocks(values.of(weight, parameter), weight, values.weight_map.pieces(weight))


def in_blocks(value: Tensor, weight: Weight, pieces: Sequence[Piece]) -> Tensor:
    """Return the quantised and dequantised elements of a parameter, of its shape and dtype.

    Blocks are cut from the Hugging Face tensors: for example, the q, k and v of a fused qkv have blocks of
    their own. pieces: the parameter's pieces of these tensors.
    """
    out = value.clone()
    for name in weight.hf:
        own = [piece for piece in pieces if piece.hf == name]
        if not own:
            continue
        box = fp8_blocks.box_of(own, name)
        matrix = value.new_empty([stop - start for start, stop in box])
        for piece in own:
            matrix[index(relative(piece.hf_box, box))] = value[index(piece.local_box)]
        in_fp8, factors = fp8_blocks.quantised(matrix)
        matrix = fp8_blocks.dequantised(in_fp8, factors, whole(matrix.shape)).to(value.dtype)
        for piece in own:
            out[index(piece.local_box)] = matrix[index(relative(piece.hf_box, box))]
    return out


def parts(config: Config, adapters: Sequence[Adapter]) -> list[EnginePart]:
    """Return the parts of an engine."""
    return [GroupedFp8Weights()]
