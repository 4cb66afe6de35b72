"""The bytes that a refit moves on every rank, computed from the plan alone for any number of ranks."""

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rl.models.boxes import Box, overlap, volume
from rl.models.layout import Piece, Weight
from rl.models.placement import RolloutPlacement, TrainingPlacement
from rl.refit.plan import Routing, Span, SplitKind, cut_into_batches


@dataclass(frozen=True)
class RefitTraffic:
    """Bytes of a refit on each rank, int64 [world_size] each."""

    stays: np.ndarray
    near_in: np.ndarray
    far_in: np.ndarray
    near_out: np.ndarray
    far_out: np.ndarray
    lower_bound: np.ndarray
    """Bytes that the rank's engine needs and its trainer does not hold: the minimum that it must receive."""
    gather: np.ndarray
    """Bytes that the rank would receive if every rank gathered the whole model."""
    peak_buffer: np.ndarray
    """Bytes of the largest batch's buffers."""
    partners: np.ndarray
    """Number of partners of each rank, int64 [4, world_size].

    Rows: receives from, on its node; receives from, on other nodes; sends to, on its node; sends to, on other
    nodes.
    """
    batches: list[np.ndarray]
    """Bytes of each batch, int64 [5, world_size], rows as in rl.refit.plan.

    They are upper bounds if weights are divided into parts.
    """


def refit_traffic(
    weights: list[Weight],
    training: TrainingPlacement,
    rollout: RolloutPlacement,
    *,
    ranks_per_node: int,
    itemsize: int,
    buffer_bytes: int,
) -> RefitTraffic:
    """Return the bytes of a refit on every rank. Raises ValueError as the placements and `Routing` do."""
    routing = Routing(
        weights, training, rollout, node_of=lambda rank: rank // ranks_per_node, itemsize=itemsize
    )
    batches = cut_into_batches(routing, buffer_bytes)
    peak = np.zeros(routing.world_size, np.int64)
    for spans in batches:
        peak = np.maximum(peak, sum(routing.crossing(routing.routes[s.weight], s.parts) for s in spans))
    whole = [Span(number, 0, 1) for number in range(len(weights))]
    (stays, near_in, far_in, near_out, far_out), *loads = loads_of(routing, [whole, *batches])
    bound, gather = _bounds(routing)
    return RefitTraffic(
        stays, near_in, far_in, near_out, far_out, bound, gather, peak, _partners(routing), loads
    )


def loads_of(routing: Routing, batches: Iterable[Iterable[Span]]) -> list[np.ndarray]:
    """Return the bytes that each batch moves on each rank, int64 [5, world_size], rows as in rl.refit.plan.

    If weights are divided, they are upper bounds, because parts may differ by a row.
    """
    load_of = functools.cache(routing.load)
    loads = []
    for spans in batches:
        load = np.zeros((5, routing.world_size), np.int64)
        for (route, parts), count in Counter((routing.routes[s.weight], s.parts) for s in spans).items():
            load += count * load_of(route, parts)
        loads.append(load)
    return loads


def _partners(routing: Routing) -> np.ndarray:
    """Compute `RefitTraffic.partners`."""
    sends = np.zeros((routing.world_size, routing.world_size), bool)
    for stream in routing.streams:
        sends[stream.givers[stream.crosses], stream.needers[stream.crosses]] = True
    near = routing.nodes[:, None] == routing.nodes
    return np.stack(
        [(sends & near).sum(0), (sends & ~near).sum(0), (sends & near).sum(1), (sends & ~near).sum(1)]
    )


def _bounds(routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """Return (lower_bound, gather) of `RefitTraffic`, int64 [world_size] each.

    Both follow from the two shards of each rank, not from the senders that the plan selects.
    """
    bound, gather = (np.zeros(routing.world_size, np.int64) for _ in range(2))
    shards: dict[SplitKind, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for weight, route in zip(routing.weights, routing.routes):
        size, held, needed = (
            route.kind.element_bytes,
            routing.held(route.training),
            routing.needed(route.rollout),
        )
        if route.kind not in shards:
            shards[route.kind] = _shards(weight, held.tp, routing.rollout)
        trained, served, both = shards[route.kind]
        bound[needed.ranks] += size * served[needed.tp_ranks]
        at = np.full(routing.world_size, -1)
        at[needed.ranks] = needed.tp_ranks
        here = at[held.ranks] >= 0
        bound[held.ranks[here]] -= size * both[held.tp_ranks[here], at[held.ranks[here]]]
        gather += size * weight.num_elements
        gather[held.ranks] -= size * trained[held.tp_ranks]
    return bound, gather


def _shards(weight: Weight, tp: int, rollout: RolloutPlacement) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count the elements that each tensor parallel rank trains, serves, and both.

    Returns int64 [tp], [r] and [tp, r] for r tensor parallel ranks in generation.
    """
    trained = [weight.megatron_pieces(tp, rank) for rank in range(tp)]
    served = [rollout.pieces(weight, rank) for rank in range(rollout.cut_size(weight))]
    both = [[sum(_common(a, b) for a in ours for b in theirs) for theirs in served] for ours in trained]
    return _sizes(trained), _sizes(served), np.array(both)


def _sizes(ranks: list[list[Piece]]) -> np.ndarray:
    return np.array([sum(volume(piece.hf_box) for piece in pieces) for pieces in ranks])


def _common(a: Piece, b: Piece) -> int:
    """Return the number of elements in both pieces."""
    both: Box | None = overlap(a.hf_box, b.hf_box) if a.hf == b.hf else None
    return volume(both) if both else 0
