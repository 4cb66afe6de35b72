"""How many parameters one rank of each pipeline stage holds, from the declarations of rl.models alone.

The same `Weight`s that read checkpoints and plan refits are counted, so that the numbers are those of the tensors that a run
allocates, padding of the vocabulary included (tests/dry_run compares them with real ranks).
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl.models.layout import VOCAB, Weight, padded_vocab, vocab_multiple
from rl.models.placement import TrainingPlacement


@dataclass(frozen=True)
class Part:
    """Weights of one layer, or of none, that are cut alike: one weight, or that of each routed expert."""

    weight: Weight
    """One of them."""
    count: int

    @property
    def elements(self) -> int:
        """Of all of them, in the checkpoint."""
        return self.count * sum(math.prod(shape) for shape in self.weight.shapes)


@dataclass(frozen=True)
class StageCount:
    """Elements on one rank of a pipeline stage; all its ranks hold as many."""

    num_layers: int
    shared: tuple[int, ...]
    """Of each parameter that belongs to no routed expert."""
    experts: tuple[int, ...]
    """Of each parameter of the routed experts on the rank."""
    tied: int
    """Of a tied embedding on the first or last of several stages, which Megatron gives a bucket of its own; it is not
    among `shared`."""
    buffers: int
    """Of float32 tensors that get no gradient: routers' biases."""

    @property
    def parameters(self) -> int:
        return sum(self.shared) + sum(self.experts) + self.tied


def group_parts(weights: Sequence[Weight]) -> list[Part]:
    """The weights, those of a layer's routed experts taken together. A part's elements are those of the checkpoint."""
    found: dict[tuple, tuple[Weight, int]] = {}
    for weight in weights:
        name = weight.megatron if weight.expert is None else re.sub(r"experts\.\d+\.", "", weight.hf[0])
        key = weight.layer, weight.expert is None, name
        first, count = found.get(key, (weight, 0))
        found[key] = first, count + 1
    return [Part(weight, count) for weight, count in found.values()]


def count_parameters(parts: Sequence[Part]) -> int:
    """Of the whole model, as its publisher counts: routers' biases too, padding not."""
    return sum(part.elements for part in parts)


def count_stages(parts: Sequence[Part], placement: TrainingPlacement) -> list[StageCount]:
    """What one rank of each stage holds in training."""
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
    return [
        StageCount(
            len(layers[stage]), tuple(shared[stage]), tuple(experts[stage]), tied[stage], buffers[stage]
        )
        for stage in range(placement.pp)
    ]


@functools.cache
def _local_elements(cut, names, shapes, tp: int) -> int:
    """Elements of a weight's parameter on a training rank."""
    return math.prod(Weight(names, shapes, "", "", cut).megatron_shape(tp))


def count_engine(parts: Sequence[Part], tp: int) -> tuple[int, int]:
    """Elements that a rank of a vLLM replica holds: those of the model's dtype and those in float32."""
    elements = {False: 0, True: 0}
    for part in parts:
        weight = part.weight
        if weight.cut is VOCAB:
            rows, *rest = weight.shapes[0]
            local = padded_vocab(rows, vocab_multiple(tp)) // tp * math.prod(rest)
        else:
            local = sum(
                math.prod(stop - start for start, stop in piece.local_box)
                for piece in weight.vllm_pieces(tp, 0)
            )
        elements[weight.float32] += local * part.count
    return elements[False], elements[True]


def buffer_elements(numels: Sequence[int], dp: int) -> int:
    """Elements of a Megatron bucket of a distributed optimizer (`_ParamAndGradBuffer` of megatron-core 0.16.1): parameters
    start at multiples of 64, and the end divides over the data parallel ranks in multiples of 128 elements."""
    multiple = math.lcm(dp, 128)
    return -(-sum(-(-numel // 64) * 64 for numel in numels) // multiple) * multiple
