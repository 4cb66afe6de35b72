"""How a parameter of one rank lies in the logical tensors of a Hugging Face checkpoint.

Both sides of the suite hold fused and cut parameters: Megatron interleaves query, key and value per KV group, vLLM lays
them end to end; both join gate and up, pad the vocabulary and split over tensor parallel ranks. Each such parameter is
described as a list of `Piece`s, boxes of Hugging Face tensors and where they lie locally. That one description drives
reading checkpoints, writing them, refit and the equality check. Plain data: no torch, no Megatron, no vLLM.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a login node, where --dry-run counts bytes, has no torch
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension."""


@dataclass(frozen=True)
class Piece:
    """A box of the Hugging Face tensor `hf` and the box of the local parameter that holds the same elements."""

    hf: str
    hf_box: Box
    local_box: Box


@dataclass(frozen=True)
class Cut:
    """How the two sides hold a weight. Each function maps (hf names, hf shapes, tp, tp_rank) to pieces."""

    megatron: Callable[..., list[Piece]]
    vllm: Callable[..., list[Piece]]
    split: bool = True
    """Whether tensor parallel ranks hold different elements (False: each holds all)."""


@dataclass(frozen=True)
class Weight:
    """One parameter of the model, under its three names."""

    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the Hugging Face tensors."""
    megatron: str
    """Name in Megatron's local layer spec; `{layer}` stands for the layer's index within the pipeline stage, `{expert}` for
    the expert's within its expert parallel rank."""
    vllm: str
    cut: Cut
    layer: int | None = None
    """Global index of the layer, or None for the embedding, the final norm and the head."""
    expert: int | None = None
    """Routed expert that it belongs to: on Megatron's side it lies on one expert parallel rank, and `tp` below is then the
    experts' own tensor parallel size; on vLLM's it is part of a parameter of all experts."""
    first_stage: bool = False
    """On the first pipeline stage (where `layer` is None)."""
    optional: bool = False
    """A checkpoint may lack it: the parameter then starts at 0."""
    float32: bool = False
    """Held in float32 on both sides, whatever the model's dtype."""
    tied_to_head: bool = False
    """An embedding that is the head as well: the last stage of a pipeline holds it again, as output_layer.weight."""

    def megatron_pieces(self, tp: int, tp_rank: int) -> list[Piece]:
        """Pieces of the Megatron parameter on one tensor parallel rank."""
        return self.cut.megatron(self.hf, self.shapes, tp, tp_rank)

    def megatron_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of the Megatron parameter, the same on every tensor parallel rank; a vocabulary counts its padding."""
        if self.cut is VOCAB:
            rows, *rest = self.shapes[0]
            return (padded_vocab(rows, vocab_multiple(tp)) // tp, *rest)
        boxes = [piece.local_box for piece in self.megatron_pieces(tp, 0)]
        return tuple(max(box[dim][1] for box in boxes) for dim in range(len(boxes[0])))

    def vllm_pieces(self, tp: int, tp_rank: int) -> list[Piece]:
        """Pieces of the vLLM parameter on one tensor parallel rank."""
        return self.cut.vllm(self.hf, self.shapes, tp, tp_rank)


def index(box: Box) -> tuple[slice, ...]:
    """The box as an index of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def _full(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def _rows(name: str, shape: tuple[int, ...], start: int, stop: int, at: int) -> Piece:
    """Rows start..stop of the tensor, from local row `at` on."""
    rest = _full(shape[1:])
    return Piece(name, ((start, stop), *rest), ((at, at + stop - start), *rest))


def _whole(names, shapes, tp, rank):
    return [Piece(names[0], _full(shapes[0]), _full(shapes[0]))]


def _column(names, shapes, tp, rank):
    """Rank r holds the r-th part of the rows (the output features) of each tensor, tensors stacked: gate over up."""
    pieces, at = [], 0
    for name, shape in zip(names, shapes):
        size = shape[0] // tp
        pieces.append(_rows(name, shape, rank * size, (rank + 1) * size, at))
        at += size
    return pieces


def _row(names, shapes, tp, rank):
    """Rank r holds the r-th part of the columns (the input features)."""
    rows, columns = shapes[0]
    size = columns // tp
    return [Piece(names[0], ((0, rows), (rank * size, (rank + 1) * size)), ((0, rows), (0, size)))]


REPLICATED = Cut(_whole, _whole, split=False)
COLUMN = Cut(_column, _column)
GATE_UP = COLUMN
ROW = Cut(_row, _row)


def stage_layers(num_layers: int, pp: int) -> list[int]:
    """Layers on each pipeline stage of training: as even as can be. Where some stages have one fewer, those are the last and
    the first, which hold the head and the embedding as well, and then their neighbours in turn."""
    most = -(-num_layers // pp)
    by_load = sorted(range(pp), key=lambda stage: (min(pp - 1 - stage, stage), -stage))
    fewer = by_load[: most * pp - num_layers]
    return [most - (stage in fewer) for stage in range(pp)]


def padded_vocab(vocab_size: int, multiple: int) -> int:
    """The vocabulary size rounded up to a multiple."""
    return -(-vocab_size // multiple) * multiple


def vocab_multiple(tp: int) -> int:
    """What both sides pad the vocabulary to: vLLM's 64, and divisible by tp."""
    return math.lcm(64, tp)


def _vocab(names, shapes, tp, rank):
    """Rank r holds the r-th part of the padded rows; rows that only pad belong to no piece."""
    size = padded_vocab(shapes[0][0], vocab_multiple(tp)) // tp
    start, stop = rank * size, min((rank + 1) * size, shapes[0][0])
    return [_rows(names[0], shapes[0], start, stop, 0)] if start < stop else []


VOCAB = Cut(_vocab, _vocab)


def qkv(num_heads: int, num_kv_heads: int, head_dim: int) -> Cut:
    """Query, key and value, weights or biases.

    Megatron: per KV group its queries, its key, its value, groups end to end, a rank holds whole groups.
    vLLM: a rank's queries, then its keys, then its values; for tp > num_kv_heads each KV head is on several ranks.
    """
    per_group = num_heads // num_kv_heads * head_dim

    def megatron(names, shapes, tp, rank):
        groups = num_kv_heads // tp
        pieces, at = [], 0
        for group in range(rank * groups, (rank + 1) * groups):
            for name, shape, size in zip(names, shapes, (per_group, head_dim, head_dim)):
                pieces.append(_rows(name, shape, group * size, (group + 1) * size, at))
                at += size
        return pieces

    def vllm(names, shapes, tp, rank):
        heads, kv_heads = num_heads // tp, max(1, num_kv_heads // tp)
        first_kv = rank * num_kv_heads // tp
        pieces, at = [], 0
        for name, shape, first, count in zip(
            names, shapes, (rank * heads, first_kv, first_kv), (heads, kv_heads, kv_heads)
        ):
            pieces.append(_rows(name, shape, first * head_dim, (first + count) * head_dim, at))
            at += count * head_dim
        return pieces

    return Cut(megatron, vllm)


def rows_from(offset: int) -> Cut:
    """Whole on every rank; vLLM holds it from row `offset` on in a parameter that it shares with another weight."""

    def vllm(names, shapes, tp, rank):
        return [_rows(names[0], shapes[0], 0, shapes[0][0], offset)]

    return Cut(_whole, vllm, split=False)


def _stacked(pieces: Callable[..., list[Piece]], expert: int) -> Callable[..., list[Piece]]:
    """The same pieces within a parameter [E, ...] that stacks all experts."""

    def of_expert(names, shapes, tp, rank):
        return [
            Piece(piece.hf, piece.hf_box, ((expert, expert + 1), *piece.local_box))
            for piece in pieces(names, shapes, tp, rank)
        ]

    return of_expert


@functools.cache
def expert_gate_up(expert: int) -> Cut:
    """Gate and up of one routed expert. Megatron: its own parameter [2F/etp, H]. vLLM: [E, 2F/tp, H] for all."""
    return Cut(_column, _stacked(_column, expert))


@functools.cache
def expert_down(expert: int) -> Cut:
    """Down projection of one routed expert. Megatron: its own parameter [H, F/etp]. vLLM: [E, H, F/tp] for all."""
    return Cut(_row, _stacked(_row, expert))


def assemble(weight: Weight, shards: list[Tensor]) -> dict[str, Tensor]:
    """The full Hugging Face tensors of a weight from the Megatron shards of all tensor parallel ranks, in rank order."""
    out = {name: shards[0].new_empty(shape) for name, shape in zip(weight.hf, weight.shapes)}
    for rank, shard in enumerate(shards):
        for piece in weight.megatron_pieces(len(shards), rank):
            out[piece.hf][index(piece.hf_box)] = shard[index(piece.local_box)]
        if not weight.cut.split:
            break
    return out
