"""The low-rank adapters of a model: which linear layers have one, and where its parts lie.

Plain data, as `rl.models.layout`. A linear layer of the checkpoint, such as q_proj, has one adapter, although
Megatron and vLLM hold it as a part of a fused parameter: A [r, in] and B [out, r], with B A of the shape of
its weight. If the layer is split by rows (output features), every tensor parallel rank holds the whole A and
its own rows of B. If the layer is split by columns (input features), every rank holds its own columns of A
and the whole B. In both cases a rank's B times its A is its own part of B A, without communication. If ranks
with different samples share the layer (`Cut.sharded`), each holds rows of A and of B.

Names in checkpoints are peft's.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rl.models.boxes import whole
from rl.models.layout import REPLICATED, ROW, Cut, Piece, PieceFunction, Weight, whole_of
from rl.models.placement import count_experts, training_ranges

PREFIX = "base_model.model."
"""Prefix of the name of every tensor in a checkpoint of peft."""


@dataclass(frozen=True)
class LowRank:
    """The adapter of one linear layer of the checkpoint."""

    base: Weight
    """The weight that holds the layer as a part, for example linear_qkv for q_proj."""
    part: int
    """Index of the layer's tensor in `base.hf`."""
    a: Weight
    b: Weight
    magnitude: Weight | None
    """DoRA's length of each row, [out]; None without DoRA."""

    @property
    def module(self) -> str:
        """Return the layer's name in transformers' model, such as model.layers.0.self_attn.q_proj."""
        return self.base.module(self.part)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return A, B and with DoRA the magnitude."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)


def adapters(
    weights: Sequence[Weight], *, rank: int, targets: Sequence[str] = (), dora: bool = False
) -> list[LowRank]:
    """Return the adapters of the model's linear layers that match a target, in the order of `weights`.

    targets: last parts of the layers' names, for example q_proj; none: all linear layers. Raises ValueError
    for a target that matches no linear layer.
    """
    layers = list(_linear_layers(weights))
    names = [weight.module(part) for weight, part in layers]
    for target in targets:
        if not any(_matches(name, target) for name in names):
            known = sorted({name.rpartition(".")[2] for name in names})
            raise ValueError(
                f"adapter.targets={target} matches no linear layer of the model; use one of "
                f"{', '.join(known)}."
            )
    return [
        _low_rank(weight, part, rank, dora)
        for (weight, part), name in zip(layers, names)
        if not targets or any(_matches(name, target) for target in targets)
    ]


def check_ranks(
    pairs: Sequence[LowRank], weights: Sequence[Weight], *, num_layers: int, pp: int, ep: int, vpp: int = 1
) -> None:
    """Raise ValueError if a rank has no adapter, and so nothing to learn.

    weights: all weights of the model.
    """
    experts_per_rank = count_experts(weights) // ep
    for part, (first, stop) in enumerate(training_ranges(num_layers, pp * vpp)):
        experts = [pair.base.expert for pair in pairs if first <= (pair.base.layer or 0) < stop]
        ranks = {expert // experts_per_rank for expert in experts if expert is not None}
        if None not in experts and len(ranks) < ep:
            raise ValueError(
                f"adapter.targets gives no adapter to ranks of pipeline stage {part % pp} (layers {first} to "
                f"{stop - 1}) with training.pp={pp} and training.ep={ep}: they would have nothing to learn; "
                "choose targets in every stage, and not only some experts."
            )


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _linear_layers(weights: Sequence[Weight]) -> Iterator[tuple[Weight, int]]:
    """Yield (weight, index of its tensor) of every linear layer except routers, gates, embedding and head.

    Experts that the checkpoint or a class of transformers holds in one tensor have no adapters, because peft
    has one adapter for all of them.
    """
    for weight in weights:
        is_matrix = weight.layer is not None and len(weight.shapes[0]) == 2 and weight.stored is None
        is_matrix &= bool(weight.modules) or not weight.cut.sharded  # only a class names each linear layer
        if is_matrix and ".router." not in weight.megatron and not weight.megatron.endswith("gate_weight"):
            yield from ((weight, part) for part in range(len(weight.hf)))


def _low_rank(base: Weight, part: int, rank: int, dora: bool) -> LowRank:
    (rows, columns), name = base.shapes[part], base.module(part)
    last, by_columns = name.rpartition(".")[2], splits_columns(base)

    def weight(kind: str, cut: Cut, *shape: int, suffix: str = ".weight", float32: bool = False) -> Weight:
        return Weight(
            hf=(f"{PREFIX}{name}.{kind}{suffix}",),
            shapes=(shape,),
            megatron=f"{base.megatron.removesuffix('.weight')}.{kind}.{last}",
            vllm=f"{name}.{kind}",
            cut=cut,
            layer=base.layer,
            expert=base.expert,
            float32=float32,
        )

    columns_cut = ROW if by_columns else REPLICATED
    if base.cut.sharded:
        columns_cut = Cut(base.cut.megatron, whole_of, sharded=True)
    rows_cut = _same_rows(base, part) if base.cut.split and not by_columns else REPLICATED
    return LowRank(
        base,
        part,
        weight("lora_A", columns_cut, rank, columns),
        weight("lora_B", rows_cut, rows, rank),
        weight("lora_magnitude_vector", rows_cut, rows, suffix="", float32=True) if dora else None,
    )


@functools.cache
def _same_rows(base: Weight, part: int) -> Cut:
    """Return the cut that gives a rank the same rows of a tensor as it holds of tensor `part` of the base.

    In vLLM several ranks hold the rows of a key or value head, if there are more ranks than heads.
    """

    def of(pieces: Callable[[int, int], list[Piece]]) -> PieceFunction:
        def of_rows(
            names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int
        ) -> list[Piece]:
            out, at, columns = [], 0, whole(shapes[0][1:])
            for start, stop in sorted(p.hf_box[0] for p in pieces(tp, rank) if p.hf == base.hf[part]):
                out.append(Piece(names[0], ((start, stop), *columns), ((at, at + stop - start), *columns)))
                at += stop - start
            return out

        return of_rows

    return Cut(of(base.megatron_pieces), of(base.vllm_pieces), sharded=base.cut.sharded)


def splits_columns(weight: Weight) -> bool:
    """Return whether tensor parallel ranks hold parts of the weight's columns (input features)."""
    pieces = [piece for rank in (0, 1) for piece in weight.megatron_pieces(2, rank)]  # none of a single head
    return weight.cut.split and any(piece.hf_box[1] != (0, weight.shapes[0][1]) for piece in pieces)
