"""The mapping between the parameters of one rank and the tensors of a Hugging Face checkpoint.

Megatron and vLLM hold fused and split parameters. Megatron interleaves query, key and value per KV group;
vLLM concatenates them. Both concatenate gate and up, pad the vocabulary and split over tensor parallel ranks.
A list of `Piece`s describes each parameter: boxes of Hugging Face tensors and their boxes in the parameter.
Checkpoints, the refit and its equality check all use this description. Plain data: no torch, no Megatron, no
vLLM.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl.models.boxes import Box, index, moved, overlap, whole

if TYPE_CHECKING:  # importing this needs no torch, which a login node may lack
    from torch import Tensor

FP8_BLOCK = 128
"""Rows and columns of a block of an FP8 weight; each block has one factor."""
TOWER = "visual."
"""Prefix of the names of a vision tower's weights in Megatron and vLLM."""


@dataclass(frozen=True)
class Piece:
    """A box of the Hugging Face tensor `hf`, and the box of the local parameter with the same elements."""

    hf: str
    hf_box: Box
    local_box: Box

    def local(self, box: Box) -> Box:
        """Return the box of the parameter that holds `box`, a part of `hf_box`."""
        extra = len(self.local_box) - len(box)  # a parameter of all experts has one dimension more
        return (*self.local_box[:extra], *moved(box, self.hf_box, self.local_box[extra:]))


PieceFunction = Callable[[Sequence[str], Sequence[tuple[int, ...]], int, int], list[Piece]]
"""A function from Hugging Face names and shapes, tp and a tensor parallel rank to the rank's pieces."""


@dataclass(frozen=True)
class Cut:
    """The functions that split a weight in Megatron and in vLLM."""

    megatron: PieceFunction
    vllm: PieceFunction
    split: bool = True
    """Whether tensor parallel ranks hold different elements; if False, each holds all."""
    sharded: bool = False
    """Whether the ranks that hold parts have different samples (`training.shard`), so that a layer computes
    with the whole weight."""


@dataclass(frozen=True)
class Stored:
    """The place of an expert's tensor, if the files hold one tensor for all experts of a layer."""

    name: str
    index: int
    """Index of the expert in the first dimension."""
    count: int
    """Number of experts."""
    transposed: bool = False
    """Whether the files hold the matrix with rows and columns exchanged."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor in the files. shape: one expert's shape."""
        return (self.count, *(reversed(shape) if self.transposed else shape))

    def box(self, box: Box) -> Box:
        """Return the box of the tensor in the files. box: a box of one expert's tensor."""
        return ((self.index, self.index + 1), *(reversed(box) if self.transposed else box))


@dataclass(frozen=True)
class Weight:
    """One parameter of the model, with its names in Hugging Face, Megatron and vLLM."""

    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the Hugging Face tensors."""
    megatron: str
    """Name in Megatron's local layer spec.

    `{layer}` is the layer's index within the pipeline stage, `{expert}` the expert's index within its expert
    parallel rank.
    """
    vllm: str
    cut: Cut
    layer: int | None = None
    """Global index of the layer; None for the embedding, the final norm and the head."""
    expert: int | None = None
    """Index of the routed expert.

    In Megatron one expert parallel rank holds the expert, and `tp` below is the experts' tensor parallel
    size. In vLLM the weight is a part of one parameter of all experts.
    """
    first_stage: bool = False
    """Whether a weight without a layer is on the first pipeline stage, not on the last."""
    optional: bool = False
    """Whether a checkpoint may lack the weight; the parameter then starts at 0."""
    float32: bool = False
    """Whether Megatron and vLLM hold the weight in float32 for every dtype of the model."""
    tied_to_head: bool = False
    """Whether the embedding is also the head. The last pipeline stage holds a copy, output_layer.weight."""
    stored: Stored | None = None
    """Place of its only tensor in a tensor of all experts; None: the files hold it under its own name."""
    modules: tuple[str, ...] = ()
    """Names of its layers in transformers' model, if they differ from the names in checkpoints."""

    def module(self, part: int) -> str:
        """Return the name in transformers' model of the layer with tensor `part` of `hf` as its weight."""
        return self.modules[part] if self.modules else self.hf[part].removesuffix(".weight")

    @property
    def is_routed(self) -> bool:
        """Whether it belongs to one routed expert, or to all of a layer (`rl.models.by_class`)."""
        return self.expert is not None or ".routed_experts." in self.vllm

    @property
    def num_elements(self) -> int:
        """Number of elements of its Hugging Face tensors."""
        return sum(math.prod(shape) for shape in self.shapes)

    def bytes_per_element(self, itemsize: int) -> int:
        """Return the bytes of one element in a model with a dtype of `itemsize` bytes."""
        return 4 if self.float32 else itemsize

    def megatron_pieces(self, tp: int, tp_rank: int) -> list[Piece]:
        """Return the pieces of the Megatron parameter on one tensor parallel rank."""
        return self.cut.megatron(self.hf, self.shapes, tp, tp_rank)

    def megatron_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape of the Megatron parameter on every tensor parallel rank, padding included."""
        if self.cut is VOCAB:
            rows, *rest = self.shapes[0]
            return (padded_vocab(rows, vocab_multiple(tp)) // tp, *rest)
        boxes = [piece.local_box for piece in self.megatron_pieces(tp, 0)]
        return tuple(max(box[dim][1] for box in boxes) for dim in range(len(boxes[0])))

    def vllm_pieces(self, tp: int, tp_rank: int) -> list[Piece]:
        """Return the pieces of the vLLM parameter on one tensor parallel rank."""
        return self.cut.vllm(self.hf, self.shapes, tp, tp_rank)


def rows_at(name: str, shape: tuple[int, ...], start: int, stop: int, at: int) -> Piece:
    """Return the piece of rows start..stop of the tensor, which begin at local row `at`."""
    rest = whole(shape[1:])
    return Piece(name, ((start, stop), *rest), ((at, at + stop - start), *rest))


def whole_of(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
    return [Piece(names[0], whole(shapes[0]), whole(shapes[0]))]


def _column(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
    """Split the rows (output features) of each tensor over the ranks.

    The parts of a rank, such as gate and up, are concatenated.
    """
    pieces, at = [], 0
    for name, shape in zip(names, shapes):
        size = shape[0] // tp
        pieces.append(rows_at(name, shape, rank * size, (rank + 1) * size, at))
        at += size
    return pieces


def _row(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
    """Split the columns (input features) over the ranks."""
    rows, columns = shapes[0]
    size = columns // tp
    return [Piece(names[0], ((0, rows), (rank * size, (rank + 1) * size)), ((0, rows), (0, size)))]


REPLICATED = Cut(whole_of, whole_of, split=False)
COLUMN = Cut(_column, _column)
ROW = Cut(_row, _row)


def stage_layers(num_layers: int, pp: int) -> list[int]:
    """Return the number of layers of each pipeline stage in training; counts differ by at most 1.

    Stages get one layer fewer in this order: the last (it also holds the head), the first (it also holds the
    embedding), then their neighbours. For example, 10 layers on 4 stages are 2, 3, 3, 2.
    """
    most = -(-num_layers // pp)
    by_load = sorted(range(pp), key=lambda stage: (min(pp - 1 - stage, stage), -stage))
    fewer = by_load[: most * pp - num_layers]
    return [most - (stage in fewer) for stage in range(pp)]


def recomputed_layers(num_layers: int, every: int) -> int:
    """Return the number of a stage's first layers that are recomputed, for example 3 of 10 with every=4."""
    return -(-num_layers // every)


def padded_vocab(vocab_size: int, multiple: int) -> int:
    """Return the vocabulary size rounded up to a multiple, for example 1000 to 1024 with multiple=64."""
    return -(-vocab_size // multiple) * multiple


def vocab_multiple(tp: int) -> int:
    """Return the multiple to which Megatron and vLLM pad the vocabulary: lcm(64, tp), 64 as in vLLM."""
    return math.lcm(64, tp)


def _vocab(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
    """Split the padded rows over the ranks; padding belongs to no piece."""
    size = padded_vocab(shapes[0][0], vocab_multiple(tp)) // tp
    start, stop = rank * size, min((rank + 1) * size, shapes[0][0])
    return [rows_at(names[0], shapes[0], start, stop, 0)] if start < stop else []


VOCAB = Cut(_vocab, _vocab)


def qkv(num_heads: int, num_kv_heads: int, head_dim: int) -> Cut:
    """Return the cut of query, key and value, weights or biases.

    Megatron concatenates KV groups: for each group its queries, its key and its value. A rank holds whole
    groups. vLLM concatenates a rank's queries, its keys and its values. With tp > num_kv_heads, several ranks
    hold each KV head; for example, two do with tp=8 and 4 KV heads.
    """
    per_group = num_heads // num_kv_heads * head_dim

    def megatron(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
        groups = num_kv_heads // tp
        pieces, at = [], 0
        for group in range(rank * groups, (rank + 1) * groups):
            for name, shape, size in zip(names, shapes, (per_group, head_dim, head_dim)):
                pieces.append(rows_at(name, shape, group * size, (group + 1) * size, at))
                at += size
        return pieces

    def vllm(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
        heads, kv_heads = num_heads // tp, max(1, num_kv_heads // tp)
        first_kv = rank * num_kv_heads // tp
        pieces, at = [], 0
        for name, shape, first, count in zip(
            names, shapes, (rank * heads, first_kv, first_kv), (heads, kv_heads, kv_heads)
        ):
            pieces.append(rows_at(name, shape, first * head_dim, (first + count) * head_dim, at))
            at += count * head_dim
        return pieces

    return Cut(megatron, vllm)


@functools.cache
def kv_heads(num_kv_heads: int, head_dim: int) -> Cut:
    """Return the cut of a weight [kv heads x channels].

    With tp > num_kv_heads, several of vLLM's ranks hold the rows of each KV head, as for keys (`qkv`).
    """

    def vllm(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
        count = max(1, num_kv_heads // tp) * head_dim
        first = rank * num_kv_heads // tp * head_dim
        return [rows_at(names[0], shapes[0], first, first + count, 0)]

    return Cut(_column, vllm)


@functools.cache
def joined(cut: Cut, rows: tuple[int, ...]) -> Cut:
    """Return the cut of one Hugging Face tensor that joins the tensors of `cut`.

    Tensor i of `cut` is a block of `rows[i]` rows.
    """

    def of(pieces: Callable[..., list[Piece]]) -> Callable[..., list[Piece]]:
        def of_whole(
            names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int
        ) -> list[Piece]:
            starts = {str(part): start for part, start in enumerate(itertools.accumulate(rows, initial=0))}
            parts = [(size, *shapes[0][1:]) for size in rows]
            found = pieces(tuple(starts)[: len(rows)], parts, tp, rank)
            return [replace(p, hf=names[0], hf_box=_lower(p.hf_box, starts[p.hf])) for p in found]

        return of_whole

    return Cut(of(cut.megatron), of(cut.vllm), cut.split)


def _lower(box: Box, rows: int) -> Box:
    """Return the box shifted down by some rows."""
    (start, stop), *rest = box
    return ((start + rows, stop + rows), *rest)


def rows_from(offset: int) -> Cut:
    """Return the cut of a weight that every rank holds whole.

    In vLLM the weight is a part of a larger parameter: its rows from `offset` on.
    """

    def vllm(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
        return [rows_at(names[0], shapes[0], 0, shapes[0][0], offset)]

    return Cut(whole_of, vllm, split=False)


def _stacked(pieces: PieceFunction, expert: int) -> PieceFunction:
    """Return the same pieces within a parameter [E, ...] of all experts."""

    def of_expert(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
        found = pieces(names, shapes, tp, rank)
        return [replace(piece, local_box=((expert, expert + 1), *piece.local_box)) for piece in found]

    return of_expert


@functools.cache
def expert_gate_up(expert: int) -> Cut:
    """Return the cut of an expert's gate and up.

    Megatron has a parameter [2F/etp, H] for each expert, vLLM one parameter [E, 2F/tp, H] for all experts.
    """
    return Cut(_column, _stacked(_column, expert))


@functools.cache
def expert_down(expert: int) -> Cut:
    """Return the cut of an expert's down.

    Megatron has a parameter [H, F/etp] for each expert, vLLM one parameter [E, H, F/tp] for all experts.
    """
    return Cut(_row, _stacked(_row, expert))


def _on_first(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
    return whole_of(names, shapes, tp, rank) if rank == 0 else []


@functools.cache
def expert_down_bias(expert: int) -> Cut:
    """Return the cut of the bias [H] of an expert's down.

    In Megatron every rank holds the whole bias. vLLM has one parameter [E, H] for all experts. vLLM adds the
    outputs of the ranks, so only the first rank holds the bias and the others hold zeros.
    """
    return Cut(whole_of, _stacked(_on_first, expert), split=False)


def cuts_fp8_blocks(weight: Weight, tp: int) -> bool:
    """Return whether the FP8 blocks of a rank's Megatron parameter differ from the whole parameter's.

    Blocks begin at the first element of a parameter [rows, columns]. Each part that the rank holds must begin
    where a block begins in both parameters, and end where a block or the whole parameter ends. Otherwise the
    blocks differ.
    """
    sizes, pieces = weight.megatron_shape(1), weight.megatron_pieces(1, 0)
    for rank in range(tp if weight.cut.split else 0):
        parts = set()  # (dimension, start in the rank's parameter, start and stop in the whole)
        for own, piece in itertools.product(weight.megatron_pieces(tp, rank), pieces):
            box = overlap(own.hf_box, piece.hf_box) if own.hf == piece.hf else None
            if box is not None:
                here, there = moved(box, own.hf_box, own.local_box), moved(box, piece.hf_box, piece.local_box)
                parts |= {(dim, here[dim][0], *there[dim]) for dim in range(len(box))}
        for dim, size in enumerate(sizes):
            runs: list[list[int]] = []  # parts that are adjacent in both
            for _, start, first, last in sorted(part for part in parts if part[0] == dim):
                if runs and runs[-1][2] == first:
                    runs[-1][2] = last
                else:
                    runs.append([start, first, last])
            for start, first, last in runs:
                if start % FP8_BLOCK or first % FP8_BLOCK or last % FP8_BLOCK and last != size:
                    return True
    return False


def assemble(weight: Weight, shards: list[Tensor]) -> dict[str, Tensor]:
    """Return the whole Hugging Face tensors of a weight, by name.

    shards: the Megatron parameters of all tensor parallel ranks, in order.
    """
    out = {name: shards[0].new_empty(shape) for name, shape in zip(weight.hf, weight.shapes)}
    for rank, shard in enumerate(shards):
        for piece in weight.megatron_pieces(len(shards), rank):
            out[piece.hf][index(piece.hf_box)] = shard[index(piece.local_box)]
        if not weight.cut.split:
            break
    return out
