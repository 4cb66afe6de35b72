"""The number of parameters on one rank of each pipeline stage, from the declarations of rl.models alone.

Checkpoints and refits use the same `Weight`s, so the numbers count the tensors that a run allocates, with the
padding of the vocabulary (tests/ranks/dry_run compares them with real ranks).
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl.models.boxes import volume
from rl.models.layout import VOCAB, Cut, Weight, padded_vocab, vocab_multiple
from rl.models.placement import RolloutPlacement, TrainingPlacement

ITEMSIZE = {"bfloat16": 2, "float32": 4}
"""Bytes of an element, by model.dtype."""


@dataclass(frozen=True)
class CountedWeight:
    """One weight, or the same weight of each routed expert of a layer."""

    weight: Weight
    """A representative of the weights."""
    count: int

    @property
    def elements(self) -> int:
        """Number of elements of all its weights in the checkpoint."""
        return self.count * self.weight.num_elements


@dataclass(frozen=True)
class StageCount:
    """Numbers of elements on one rank of a pipeline stage; equal for all its ranks."""

    num_layers: int
    shared: tuple[int, ...]
    """Elements of each parameter outside routed experts."""
    experts: tuple[int, ...]
    """Elements of each parameter of the rank's routed experts."""
    tied: int
    """Elements of a tied embedding on the first or last of several stages.

    It has its own bucket in Megatron and is not included in `shared`.
    """
    buffers: int
    """Elements of float32 tensors without gradient: routers' biases."""

    @property
    def parameters(self) -> int:
        return sum(self.shared) + sum(self.experts) + self.tied


def group_parts(weights: Sequence[Weight]) -> list[CountedWeight]:
    """Return the weights as parts; the same weight of a layer's routed experts is one part."""
    found: dict[tuple, tuple[Weight, int]] = {}
    for weight in weights:
        name = weight.megatron if weight.expert is None else re.sub(r"experts\.\d+\.", "", weight.hf[0])
        key = weight.layer, weight.expert is None, name
        first, count = found.get(key, (weight, 0))
        found[key] = first, count + 1
    return [CountedWeight(weight, count) for weight, count in found.values()]


def count_parameters(parts: Sequence[CountedWeight]) -> int:
    """Return the model's number of parameters as published: with routers' biases, without padding."""
    return sum(part.elements for part in parts)


def count_stages(parts: Sequence[CountedWeight], placement: TrainingPlacement) -> list[StageCount]:
    """Return the numbers of elements that one rank of each stage holds in training."""
    shared: list[list[int]] = [[] for _ in range(placement.pp)]
    experts: list[list[int]] = [[] for _ in range(placement.pp)]
    layers: list[set] = [set() for _ in range(placement.pp)]
    tied, buffers = [0] * placement.pp, [0] * placement.pp
    for part in parts:
        weight = part.weight
        elements = _local_elements(weight.cut, weight.hf, weight.shapes, placement.cut_size(weight))
        stages = placement.place(weight).stages
        for stage in stages:
            if weight.layer is not None:
                layers[stage].add(weight.layer)
            if weight.float32:
                buffers[stage] += elements
            elif weight.expert is not None:
                experts[stage] += [elements] * (part.count // placement.ep)
            elif len(stages) > 1:
                tied[stage] += elements
            else:
                shared[stage].append(elements)
    rows = zip(map(len, layers), map(tuple, shared), map(tuple, experts), tied, buffers)
    return [StageCount(*row) for row in rows]


@functools.cache
def _local_elements(cut: Cut, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], tp: int) -> int:
    """Return the number of elements of a weight's parameter on a training rank."""
    return math.prod(Weight(names, shapes, "", "", cut).megatron_shape(tp))


def count_engine(parts: Sequence[CountedWeight], placement: RolloutPlacement) -> tuple[int, int]:
    """Return the numbers of elements on a rank of a vLLM replica: (in the model's dtype, in float32)."""
    elements = {False: 0, True: 0}
    for part in parts:
        weight = part.weight
        if weight.cut is VOCAB:
            rows, *rest = weight.shapes[0]
            local = padded_vocab(rows, vocab_multiple(placement.tp)) // placement.tp * math.prod(rest)
        else:
            local = sum(volume(piece.local_box) for piece in placement.pieces(weight, 0))
        ranks = placement.ep if weight.expert is not None else 1
        elements[weight.float32] += local * part.count // ranks
    return elements[False], elements[True]


def buffer_elements(numels: Sequence[int], dp: int) -> int:
    """Return the number of elements of a bucket of the distributed optimizer.

    The bucket is `_ParamAndGradBuffer` of megatron-core 0.16.1.

    Parameters start at multiples of 64; the end is a multiple of 128 that the data parallel ranks divide.
    """
    multiple = math.lcm(dp, 128)
    return -(-sum(-(-numel // 64) * 64 for numel in numels) // multiple) * multiple
