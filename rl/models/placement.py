"""The ranks that hold a weight, in training and in generation.

Plain data, identical on all ranks, without communication. Tensor parallel ranks are innermost in both grids.
Megatron puts pipeline stages outermost, so that a stage is a range of ranks (`training_ranks`). vLLM puts
replicas outermost, and stages next to tensor parallel ranks. For example, with 8 ranks, tp=2 and pp=2 the
first stage is ranks 0 to 3 in training, and ranks 0, 1, 4 and 5 in generation. Within a Megatron stage,
routed experts have their own grid over the same ranks.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rl.models.layout import Piece, Weight, stage_layers

Ranges = tuple[tuple[int, int], ...]
"""(first, one past the last) layer of each pipeline stage."""
JobRanks = tuple[int, ...]
"""Ranks of the job that form a grid, in the grid's order."""


def training_ranks(world_size: int, *, tp: int, pp: int, ep: int = 1) -> np.ndarray:
    """Return the ranks of the training grid by their place, int64 [pp, replicas, ep, tp].

    This is Megatron's order, "tp-cp-ep-dp-pp" with the innermost first; context parallel ranks count as
    replicas. Outside of routed experts ep is 1 and the replicas are the data parallel ranks; for experts tp
    is etp.
    """
    return np.arange(world_size).reshape(pp, -1, ep, tp)


def context_ranks(world_size: int, *, tp: int, cp: int) -> np.ndarray:
    """Return the ranks of each context parallel group, int64 [groups, cp]; order as in `training_ranks`.

    For example, with tp=2 and cp=2 the first groups are ranks 0 and 2, and ranks 1 and 3.
    """
    return np.arange(world_size).reshape(-1, cp, tp).swapaxes(1, 2).reshape(-1, cp)


def num_step_groups(
    world_size: int, *, tp: int, pp: int, cp: int, ep: int, etp: int, has_experts: bool, ties_embedding: bool
) -> int:
    """Return the number of process groups of several ranks on which a rank communicates in a training step.

    These are the world and `rl.training.grid.Grid.step_groups`. For example, 8 ranks with tp=2 have 4: the
    world, tensor parallel, data parallel, and the world again for the norm of the gradients.
    """
    sizes = [world_size, world_size, tp, pp, cp, world_size // (tp * pp)]
    if has_experts:
        sizes += [ep, etp, etp * ep, world_size // (etp * ep * pp)]
    return sum(size > 1 for size in sizes) + (ties_embedding and pp > 1)


class Place(NamedTuple):
    """The part of a grid that holds a weight. The same ranks hold all weights of one place."""

    stages: tuple[int, ...]
    """Pipeline stages; two for a tied embedding."""
    ep_rank: int | None = None
    """Expert parallel rank; None for a weight outside routed experts."""


@dataclass(frozen=True)
class Holders:
    """The ranks that hold the weights of a place, as ranks of the job, int64 [n].

    `ranks[i]` holds part `tp_ranks[i]` of the `tp` parts of a weight.
    """

    tp: int
    ranks: np.ndarray
    tp_ranks: np.ndarray


@dataclass(frozen=True)
class TrainingPlacement:
    """Megatron's grid. Raises ValueError if sizes do not divide."""

    world_size: int
    tp: int
    pp: int
    num_layers: int
    ep: int = 1
    etp: int | None = None
    """Tensor parallel size of a routed expert; None means tp, as in Megatron."""
    num_experts: int = 0
    """Number of routed experts of a layer."""
    ranks: JobRanks | None = None
    """None: the grid is the whole job."""
    vpp: int = 1
    """Chunks of the model on each rank: part v of the pp * vpp parts is chunk v // pp of stage v % pp.

    For example, with pp=2 and vpp=2 stage 0 has parts 0 and 2.
    """

    def __post_init__(self) -> None:
        _check_sizes("training", self.world_size, self.tp, self.pp, self.num_layers)
        if self.pp * self.vpp > self.num_layers:
            raise ValueError(
                f"training: pp={self.pp} x vpp={self.vpp} exceeds the {self.num_layers} layers of the model; "
                "choose a smaller vpp."
            )
        per_stage = self.world_size // self.pp
        if per_stage % (self.ep * self.expert_tp):
            raise ValueError(
                f"training: ep={self.ep} x etp={self.expert_tp} does not divide the {per_stage} ranks of a "
                "stage; choose sizes whose product does (etp defaults to tp)."
            )
        if self.num_experts % self.ep:
            raise ValueError(
                f"training: ep={self.ep} does not divide {self.num_experts} routed experts; choose one that "
                "does."
            )

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def place(self, weight: Weight) -> Place:
        """Return the place of the weight.

        A tied embedding is on the first stage, its owner, and as head on the last.
        """
        ep_rank = None if weight.expert is None else weight.expert // (self.num_experts // self.ep)
        return Place(tuple(part % self.pp for part in _stages(weight, self.ranges)), ep_rank)

    @property
    def ranges(self) -> Ranges:
        """Layers of each part of the model, in its order."""
        return training_ranges(self.num_layers, self.pp * self.vpp)

    def part(self, weight: Weight, stage: int) -> int:
        """Return the number of the model's part with which a stage holds the weight: chunk * pp + stage."""
        return next(part for part in _stages(weight, self.ranges) if part % self.pp == stage)

    def cut_size(self, weight: Weight) -> int:
        """Return the number of ranks over which the weight is split."""
        return self.tp if weight.expert is None else self.expert_tp

    def holders(self, place: Place) -> Holders:
        """Return every rank of the place, over all replicas."""
        if place.ep_rank is None:
            tp, at = self.tp, training_ranks(self.world_size, tp=self.tp, pp=self.pp)[:, :, 0]
        else:
            tp, sizes = self.expert_tp, dict(tp=self.expert_tp, pp=self.pp, ep=self.ep)
            at = training_ranks(self.world_size, **sizes)[:, :, place.ep_rank]
        ranks = at[list(place.stages)]
        tp_ranks = np.broadcast_to(np.arange(tp), ranks.shape)
        return Holders(tp, _in_job(ranks.flatten(), self.ranks), tp_ranks.flatten())


@dataclass(frozen=True)
class RolloutPlacement:
    """vLLM's grid: replica r begins at its rank r * tp * pp, and each stage is tp consecutive ranks.

    Raises ValueError if sizes do not divide.
    """

    world_size: int
    tp: int
    num_layers: int
    pp: int = 1
    ranks: JobRanks | None = None
    """None: the grid is the whole job."""
    ep: int = 1
    """Number of consecutive ranks, a multiple of tp, over which the experts of a layer are distributed. Each
    expert is then whole on one rank; with ep=1 each expert is split over tp ranks."""
    num_experts: int = 0
    """Number of routed experts of a layer; needed if ep is above 1."""

    def __post_init__(self) -> None:
        _check_sizes("rollout", self.world_size, self.tp, self.pp, self.num_layers)
        if self.ep > 1 and (self.pp > 1 or self.ep % self.tp or self.world_size % self.ep):
            raise ValueError(
                f"rollout: ep={self.ep} must be a multiple of tp={self.tp} that divides {self.world_size} "
                f"ranks, with pp=1 instead of {self.pp}."
            )
        if self.ep > 1 and (not self.num_experts or self.num_experts % self.ep):
            raise ValueError(
                f"rollout: ep={self.ep} does not divide {self.num_experts} routed experts; choose one that "
                "does."
            )

    def place(self, weight: Weight) -> Place:
        """Return the place of the weight in each replica."""
        return Place(_stages(weight, vllm_ranges(self.num_layers, self.pp)), self._owner(weight))

    def cut_size(self, weight: Weight) -> int:
        """Return the number of ranks over which the weight is split."""
        return self.tp if self._owner(weight) is None else 1

    def pieces(self, weight: Weight, tp_rank: int) -> list[Piece]:
        """Return the pieces of the vLLM parameter on a rank that holds part `tp_rank` of the weight."""
        if self.repeats(weight):
            return weight.vllm_pieces(1, 0)
        pieces = weight.vllm_pieces(self.cut_size(weight), tp_rank)
        if weight.expert is None or self.ep == 1:
            return pieces
        first = self.local_expert(weight.expert)
        return [replace(p, local_box=((first, first + 1), *p.local_box[1:])) for p in pieces]

    def pieces_on(self, weight: Weight, rank: int) -> list[Piece]:
        """Return the pieces of the vLLM parameter on a rank of the grid; none if it holds none."""
        owner = self._owner(weight)
        if owner is None:
            return self.pieces(weight, rank % self.tp)
        return self.pieces(weight, 0) if rank % self.ep == owner else []

    def local_expert(self, expert: int) -> int:
        """Return the index of a routed expert in the parameter of all experts of its rank."""
        return expert % (self.num_experts // self.ep) if self.ep > 1 else expert

    def repeats(self, weight: Weight) -> bool:
        """Return whether vLLM holds the weight whole on every rank, although others of its kind are split.

        With ep > tp > 1 each rank computes the shared experts for a part of the tokens.
        """
        return self.ep > self.tp > 1 and ".shared_experts." in weight.vllm

    def _owner(self, weight: Weight) -> int | None:
        """Return the expert parallel rank that holds the weight whole; None if no rank does alone."""
        if weight.expert is None or self.ep == 1:
            return None
        return weight.expert // (self.num_experts // self.ep)

    def holders(self, place: Place) -> Holders:
        """Return every rank of the place, over all replicas."""
        ranks = np.arange(self.world_size)
        if place.ep_rank is not None:
            ranks = ranks[ranks % self.ep == place.ep_rank]
            return Holders(1, _in_job(ranks, self.ranks), np.zeros_like(ranks))
        ranks = ranks[np.isin(ranks // self.tp % self.pp, place.stages)]
        return Holders(self.tp, _in_job(ranks, self.ranks), ranks % self.tp)


@functools.cache
def training_ranges(num_layers: int, pp: int) -> Ranges:
    """Return the layers of each stage as the trainer builds them.

    Pass pp * vpp as `pp` for the layers of each chunk.
    """
    return _ranges(stage_layers(num_layers, pp))


@functools.cache
def chunk_ranges(num_layers: int, pp: int, vpp: int) -> tuple[Ranges, ...]:
    """Return the layers of each chunk of each pipeline stage in training."""
    return tuple(training_ranges(num_layers, pp * vpp)[stage::pp] for stage in range(pp))


@functools.cache
def vllm_ranges(num_layers: int, pp: int) -> Ranges:
    """Return the layers of each stage as `vllm.distributed.utils.get_pp_indices` does.

    The remainder is distributed one layer each, from the second last stage backwards. For example, 9 layers
    on 4 stages are 2, 2, 3, 2.
    """
    left = num_layers % pp
    sizes = [num_layers // pp + (pp - 1 - left <= stage < pp - 1) for stage in range(pp)]
    return _ranges(sizes)


def count_experts(weights: Sequence[Weight]) -> int:
    """Return the number of routed experts of a layer; 0 for a dense model."""
    return max((weight.expert + 1 for weight in weights if weight.expert is not None), default=0)


def job_ranks(placement: TrainingPlacement | RolloutPlacement) -> JobRanks:
    """Return the ranks of the job that form the grid."""
    return tuple(range(placement.world_size)) if placement.ranks is None else placement.ranks


def _in_job(ranks: np.ndarray, job: JobRanks | None) -> np.ndarray:
    """Return the ranks of a grid as ranks of the job. job: None if the grid is the whole job."""
    return ranks if job is None else np.array(job)[ranks]


def _ranges(sizes: list[int]) -> Ranges:
    edges = np.cumsum([0, *sizes]).tolist()
    return tuple(zip(edges[:-1], edges[1:]))


def _stages(weight: Weight, ranges: Ranges) -> tuple[int, ...]:
    last = len(ranges) - 1
    if weight.layer is not None:
        return (_stage_of_layer(ranges)[weight.layer],)
    if not weight.first_stage:
        return (last,)
    return (0, last) if weight.tied_to_head and last > 0 else (0,)


@functools.cache
def _stage_of_layer(ranges: Ranges) -> list[int]:
    return [stage for stage, (start, stop) in enumerate(ranges) for _ in range(start, stop)]


def _check_sizes(side: str, world_size: int, tp: int, pp: int, num_layers: int) -> None:
    if min(world_size, tp, pp) < 1 or world_size % (tp * pp):
        raise ValueError(
            f"{side}: tp={tp} x pp={pp} does not divide {world_size} ranks; choose sizes whose product does."
        )
    if pp > num_layers:
        raise ValueError(
            f"{side}: pp={pp} exceeds the {num_layers} layers of the model; choose a smaller pp."
        )
