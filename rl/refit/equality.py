"""Comparison of the engine's weights with the trainer's, independent of the plan of the refit.

The model's list of weights says where each element of both is, so that a part which the plan omits or sends
to a wrong place is found, too. If every rank that generates with a weight also trains the same elements of
it, each rank compares its own elements bitwise. For every other weight, each rank adds the checksums of its
engine's parts, and one of the ranks that train a part subtracts its checksum times the number of copies in
all engines. A checksum depends on the position in the whole tensor, so the sum over all ranks is 0.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl.models.boxes import index, overlap, volume
from rl.models.layout import VOCAB, Piece, Weight
from rl.models.placement import RolloutPlacement, TrainingPlacement
from rl.refit.plan import Copy
from rl.runtime.checksum import different, placed_checksums


class ComparedPiece(NamedTuple):
    """A piece of one of this rank's parameters.

    tensor: index of the Hugging Face tensor among all. factor: of its checksum in the sum over ranks.
    """

    weight: int
    tensor: int
    piece: Piece
    factor: int


@dataclass(frozen=True)
class Equality:
    """Plan of what one rank compares."""

    own: tuple[Copy, ...]
    """Pairs of boxes that this rank both trains and generates with."""
    trained: tuple[ComparedPiece, ...]
    held: tuple[ComparedPiece, ...]
    weight_of: tuple[int, ...]
    """Index of the weight of each Hugging Face tensor."""
    across: bool
    """Whether any weight is compared between ranks, identical on all ranks."""


class PlacementKind(NamedTuple):
    """Placement of weights that differ only in the numbers of layer and expert, as one rank sees it.

    source, needed: this rank's tensor parallel rank in training and in generation, if any. equal_ranks: ranks
    that train the same elements. stays: whether every rank that generates with the weights also trains the
    same elements. copies: number of copies of each Hugging Face tensor in all engines.
    """

    source: int | None
    needed: int | None
    equal_ranks: list[int]
    stays: bool
    copies: list[int]


def plan_equality(
    weights: Sequence[Weight], training: TrainingPlacement, rollout: RolloutPlacement, rank: int
) -> Equality:
    """Return what a rank compares. Not collective; the arguments but `rank` are identical on all ranks."""
    own: list[Copy] = []
    trained, held = list[ComparedPiece](), list[ComparedPiece]()
    kinds: dict[tuple, PlacementKind] = {}
    first = 0
    for number, weight in enumerate(weights):
        key = weight.megatron, weight.shapes, training.place(weight), rollout.place(weight)
        if key not in kinds:
            kinds[key] = _kind(weight, training, rollout, rank)
        kind, cut = kinds[key], training.cut_size(weight)
        tensors = {name: first + place for place, name in enumerate(weight.hf)}
        first += len(tensors)
        if kind.needed is not None and kind.stays:
            pairs = _common(weight, cut, kind.source, rollout, kind.needed)
            own += [Copy(number, source.hf, source.local_box, to.local_box) for source, to in pairs]
        elif kind.needed is not None:
            pieces = rollout.pieces(weight, kind.needed)
            held += [ComparedPiece(number, tensors[piece.hf], piece, 1) for piece in pieces]
        ranks = kind.equal_ranks
        if kind.source is not None and not kind.stays and ranks[number % len(ranks)] == rank:
            for piece in weight.megatron_pieces(cut, kind.source):
                copies = kind.copies[weight.hf.index(piece.hf)]
                trained.append(ComparedPiece(number, tensors[piece.hf], piece, -copies))
    weight_of = [number for number, weight in enumerate(weights) for _ in weight.hf]
    across = not all(kind.stays for kind in kinds.values())
    return Equality(tuple(own), tuple(trained), tuple(held), tuple(weight_of), across)


def _kind(weight: Weight, training: TrainingPlacement, rollout: RolloutPlacement, rank: int) -> PlacementKind:
    holders, needers = training.holders(training.place(weight)), rollout.holders(rollout.place(weight))
    sources = dict(zip(holders.ranks.tolist(), holders.tp_ranks.tolist()))
    needed = dict(zip(needers.ranks.tolist(), needers.tp_ranks.tolist()))
    volumes: dict[int, Counter] = {tp_rank: Counter() for tp_rank in set(needed.values())}
    for tp_rank, of_names in volumes.items():
        for piece in rollout.pieces(weight, tp_rank):
            of_names[piece.hf] += volume(piece.hf_box)

    def trains_too(source: int | None, tp_rank: int) -> bool:
        found = _common(weight, training.cut_size(weight), source, rollout, tp_rank)
        return sum(volume(piece.hf_box) for piece, _ in found) == volumes[tp_rank].total()

    mine = sources.get(rank)
    return PlacementKind(
        mine,
        needed.get(rank),
        [each for each in sources if sources[each] == mine or not weight.cut.split],
        all(trains_too(*pair) for pair in {(sources.get(each), tp_rank) for each, tp_rank in needed.items()}),
        [
            sum(volumes[tp_rank][name] for tp_rank in needed.values()) // math.prod(shape)
            for name, shape in zip(weight.hf, weight.shapes)
        ],
    )


def _common(
    weight: Weight, cut: int, source: int | None, rollout: RolloutPlacement, needed: int
) -> list[tuple[Piece, Piece]]:
    """Return the elements that a training and a generating rank share, as pieces of both parameters."""
    found = []
    for mine in () if source is None else weight.megatron_pieces(cut, source):
        for theirs in rollout.pieces(weight, needed):
            box = overlap(mine.hf_box, theirs.hf_box) if mine.hf == theirs.hf else None
            if box is not None:
                found.append((Piece(mine.hf, box, mine.local(box)), Piece(mine.hf, box, theirs.local(box))))
    return found


def coverage(equality: Equality, weights: Sequence[Weight]) -> Counter[str]:
    """Return the number of elements of this rank's engine that are compared, by vLLM's name."""
    counts: Counter[str] = Counter()
    for copy in equality.own:
        counts[weights[copy.weight].vllm] += volume(copy.destination)
    for part in equality.held:
        counts[weights[part.weight].vllm] += volume(part.piece.local_box)
    return counts


def uncompared(counts: Mapping[str, int], weights: Sequence[Weight], held: Mapping[str, Tensor]) -> list[str]:
    """Return a message for each engine parameter with an element that is not compared on this rank.

    counts: compared elements (`coverage`). held: the parameters that must be compared, by vLLM's name.
    """
    padded = {weight.vllm for weight in weights if weight.cut is VOCAB}
    return [
        f"{name} on rank {dist.get_rank()}: {counts[name]} of its {tensor.numel()} elements are compared"
        for name, tensor in held.items()
        if counts[name] != tensor.numel() and not (name in padded and counts[name] < tensor.numel())
    ]


@torch.no_grad()
def differing(
    equality: Equality,
    trained: Mapping[int, Tensor],
    held: Mapping[int, Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[int]:
    """Return the indices of weights that differ within this rank, or in the sums over all ranks.

    trained, held: this rank's tensors by the index of the weight. Collective over the group, by default the
    world, with 8 bytes per Hugging Face tensor if any weight is compared between ranks.
    """
    pairs = []
    for copy in equality.own:
        source = trained[copy.weight][index(copy.source)]
        destination = held[copy.weight][index(copy.destination)]
        pairs.append((source.reshape(destination.shape), destination))
    wrong = {equality.own[number].weight for number in different(pairs)}
    if equality.across:
        sums = torch.zeros(len(equality.weight_of), dtype=torch.int64, device=device)
        for parts, tensors in ((equality.trained, trained), (equality.held, held)):
            views = [tensors[part.weight][index(part.piece.local_box)] for part in parts]
            found = placed_checksums(views, [[start for start, _ in part.piece.hf_box] for part in parts])
            rows = torch.tensor([(part.tensor, part.factor) for part in parts], dtype=torch.int64)
            places, factors = rows.view(-1, 2).to(device).unbind(1)
            sums.index_add_(0, places, found.to(device) * factors)
        dist.all_reduce(sums, group=group)
        wrong |= {equality.weight_of[tensor] for tensor in sums.nonzero().flatten().tolist()}
    return sorted(wrong)
