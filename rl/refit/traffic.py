"""What a refit would move on every rank, from the plan alone: no weights, no communication, any number of ranks."""

from dataclasses import dataclass

import numpy as np

from rl.models.layout import Box, Weight
from rl.models.placement import RolloutPlacement, TrainingPlacement
from rl.refit.plan import FAR_IN, FAR_OUT, NEAR_IN, NEAR_OUT, STAYS, Routing, cut_into_batches


@dataclass(frozen=True)
class Survey:
    """Bytes of a refit on each rank, int64 [world_size] each."""

    stays: np.ndarray
    near_in: np.ndarray
    far_in: np.ndarray
    near_out: np.ndarray
    far_out: np.ndarray
    lower_bound: np.ndarray
    """Of the rank's part of the engine, less what it trains of that."""
    gather: np.ndarray
    """Of the whole model, less what the rank trains."""
    peak_buffer: np.ndarray
    """Largest batch's messages."""
    batches: list[np.ndarray]
    """Each int64 [5, world_size], rows as in rl.refit.plan; an upper bound where weights are cut."""


def survey_refit(
    weights: list[Weight],
    training: TrainingPlacement,
    rollout: RolloutPlacement,
    *,
    ranks_per_node: int,
    itemsize: int,
    buffer_bytes: int,
) -> Survey:
    """The bytes of a refit on every rank. Raises ValueError as the placements and `Routing` do."""
    routing = Routing(
        weights, training, rollout, node_of=lambda rank: rank // ranks_per_node, itemsize=itemsize
    )
    total = np.zeros((5, training.world_size), np.int64)
    for number in range(len(weights)):
        total += routing.load(number)
    batches = [load for _, load in cut_into_batches(routing, buffer_bytes)]
    peak = (
        np.max([load[NEAR_IN:].sum(0) for load in batches], axis=0)
        if batches
        else np.zeros(training.world_size, np.int64)
    )
    bound, gather = _bounds(routing)
    rows = (total[row] for row in (STAYS, NEAR_IN, FAR_IN, NEAR_OUT, FAR_OUT))
    return Survey(*rows, bound, gather, peak, batches)


def _bounds(routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """The lower bound and the bytes of a gather, from the two shards of each rank and without the plan's choice of sources."""
    bound, gather = (np.zeros(routing.world_size, np.int64) for _ in range(2))
    by_kind: dict = {}
    for weight, route in zip(routing.weights, routing.routes):
        size = routing.bytes_per_element(weight)
        held = routing.holders(routing.training, route.training)
        needed = routing.holders(routing.rollout, route.rollout)
        if route.kind not in by_kind:
            by_kind[route.kind] = _shards(weight, held.tp, needed.tp)
        trained, served, both = by_kind[route.kind]
        bound[needed.ranks] += size * served[needed.tp_ranks]
        at = np.full(routing.world_size, -1)
        at[needed.ranks] = needed.tp_ranks
        here = at[held.ranks] >= 0
        bound[held.ranks[here]] -= size * both[held.tp_ranks[here], at[held.ranks[here]]]
        gather += size * sum(int(np.prod(shape)) for shape in weight.shapes)
        gather[held.ranks] -= size * trained[held.tp_ranks]
    return bound, gather


def _shards(weight: Weight, tp: int, rollout_tp: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Elements that each tensor parallel rank trains [tp] and serves [rollout_tp], and of both [tp, rollout_tp]."""
    trained = [[(p.hf, p.hf_box) for p in weight.megatron_pieces(tp, rank)] for rank in range(tp)]
    served = [[(p.hf, p.hf_box) for p in weight.vllm_pieces(rollout_tp, rank)] for rank in range(rollout_tp)]
    both = [[sum(_common(a, b) for a in ours for b in theirs) for theirs in served] for ours in trained]
    sizes = ([sum(_common(part, part) for part in parts) for parts in side] for side in (trained, served))
    return *map(np.array, sizes), np.array(both)


def _common(a: tuple[str, Box], b: tuple[str, Box]) -> int:
    """Elements in both boxes."""
    if a[0] != b[0]:
        return 0
    count = 1
    for (start, stop), (first, last) in zip(a[1], b[1]):
        count *= max(0, min(stop, last) - max(start, first))
    return count
