"""Which rank sends which part of which weight to whom, in a refit that moves no byte twice.

Both sides hold boxes of the same Hugging Face tensors (`rl.models.layout`). Intersecting them gives fragments, and each
rank's fragment gets exactly one source: the rank itself if it trains that part, else a rank of its node, else any that
holds it, in turn. Every rank therefore receives what its engine needs and its trainer does not hold, once.

Plain data and no communication: every rank computes the same routes and the same batches, and then its own messages only.
Names: a `kind` is a weight's Hugging Face names without layer and expert numbers, its shapes and whether ranks hold different
parts; weights of one kind are cut alike. `parts` is how many times a weight is cut to fit the buffer.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rl.models.layout import Box, Piece, Weight
from rl.models.placement import Place, RolloutPlacement, TrainingPlacement

STAYS, NEAR_IN, FAR_IN, NEAR_OUT, FAR_OUT = range(5)
"""Rows of a load, bytes per rank: copied within the rank, received and sent within a node, and between nodes."""


@dataclass(frozen=True)
class Region:
    """A box of the Hugging Face tensor `hf`, and the box of this rank's parameter that holds the same elements."""

    weight: int
    """Place in the list of weights."""
    hf: str
    box: Box
    local: Box


@dataclass(frozen=True)
class Copy:
    """A box that this rank trains and generates with: no transport."""

    weight: int
    hf: str
    source: Box
    """In the training parameter."""
    destination: Box
    """In the engine's parameter."""


@dataclass(frozen=True)
class Message:
    """What goes to or comes from one peer in one batch, packed in this order."""

    peer: int
    regions: tuple[Region, ...]
    num_bytes: int


@dataclass(frozen=True)
class Span:
    """The part-th of `parts` equal runs of rows of every fragment of a weight."""

    weight: int
    part: int
    parts: int


@dataclass(frozen=True)
class Batch:
    """Messages that travel together. Every rank has the same spans in the same batch, so that the peers' messages match."""

    spans: tuple[Span, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]

    @property
    def num_bytes(self) -> int:
        """Of the buffers that hold its messages."""
        return sum(message.num_bytes for message in (*self.sends, *self.receives))


@dataclass(frozen=True)
class Plan:
    """One rank's part of a refit."""

    rank: int
    copies: tuple[Copy, ...]
    batches: tuple[Batch, ...]

    @property
    def peak_bytes(self) -> int:
        """Of the buffers of the largest batch."""
        return max((batch.num_bytes for batch in self.batches), default=0)

    @property
    def bytes_received(self) -> int:
        return sum(message.num_bytes for batch in self.batches for message in batch.receives)

    @property
    def bytes_sent(self) -> int:
        return sum(message.num_bytes for batch in self.batches for message in batch.sends)


def plan_refit(
    weights: Sequence[Weight],
    training: TrainingPlacement,
    rollout: RolloutPlacement,
    *,
    node_of: Callable[[int], int],
    itemsize: int,
    buffer_bytes: int,
    rank: int,
) -> Plan:
    """The plan of one rank. Not collective: alike inputs on all ranks make matching plans.

    node_of: node of a rank. itemsize: bytes of an element of a weight that is not `float32`. buffer_bytes: what the messages
    of a batch, sent and received, may take on any rank; a weight's fragments are cut by rows until they fit, down to
    one row each.
    """
    routing = Routing(weights, training, rollout, node_of=node_of, itemsize=itemsize)
    batches = [spans for spans, _ in cut_into_batches(routing, buffer_bytes)]
    return plan_of(routing, batches, rank)


# Routes: who sends what to whom, for all ranks at once ---------------------------------------------------------------------


@dataclass(frozen=True)
class Fragment:
    """A box of the `hf`-th Hugging Face tensor of a weight, which one tensor parallel rank of a replica needs and some of
    the training side's hold, all of it."""

    sources: tuple[int, ...]
    """Tensor parallel ranks in training."""
    destination: int
    """Tensor parallel rank in generation."""
    hf: int
    box: Box
    num_elements: int


@dataclass(frozen=True)
class Flow:
    """Who gives the fragments that the same ranks hold to the ranks that need some of them. int64 [n] each."""

    fragments: dict[int, list[Fragment]]
    """By destination's tensor parallel rank."""
    needers: np.ndarray
    needer_tp_ranks: np.ndarray
    givers: np.ndarray


@dataclass(frozen=True, eq=False)
class Route:
    """What decides who sends to whom."""

    kind: int
    training: Place
    rollout: Place
    turn: int
    """How many ranks of a pool to pass over."""


class Routing:
    """Sources of all fragments of all weights, for all ranks. Weights of one kind and place share the computation."""

    def __init__(
        self,
        weights: Sequence[Weight],
        training: TrainingPlacement,
        rollout: RolloutPlacement,
        *,
        node_of: Callable[[int], int],
        itemsize: int,
    ):
        if training.world_size != rollout.world_size:
            raise ValueError(
                f"training has {training.world_size} ranks and generation {rollout.world_size}; give both the same world."
            )
        self.weights, self.training, self.rollout, self.itemsize = weights, training, rollout, itemsize
        self.world_size = training.world_size
        self.nodes = np.array([node_of(rank) for rank in range(self.world_size)])
        self._holders: dict = {}
        self._fragments: dict[int, list[Fragment]] = {}
        self._flows: dict[Route, list[Flow]] = {}
        self._loads: dict[tuple[Route, int], np.ndarray] = {}
        self._crossing: dict[tuple[Route, int], np.ndarray] = {}
        self.routes: list[Route] = []
        """Of each weight; one object for all that are alike."""
        kinds: dict = {}
        alike: dict = {}
        seen: Counter = Counter()
        for weight in weights:
            kind = kinds.setdefault(_kind(weight), len(kinds))
            places = training.place(weight), rollout.place(weight)
            # Alike layers ask another replica each, and so do the weights of a layer: small groups must not wear out one rank.
            turn = (kind + seen[kind, places]) % len(self.holders(training, places[0]).ranks)
            seen[kind, places] += 1
            self.routes.append(alike.setdefault((kind, places, turn), Route(kind, *places, turn)))

    def holders(self, placement: TrainingPlacement | RolloutPlacement, place: Place):
        """`placement.holders(place)`, computed once."""
        key = (placement is self.training, place)
        if key not in self._holders:
            self._holders[key] = placement.holders(place)
        return self._holders[key]

    def bytes_per_element(self, weight: Weight) -> int:
        return 4 if weight.float32 else self.itemsize

    def fragments(self, number: int) -> list[Fragment]:
        """Every fragment of the weight, by tensor parallel ranks."""
        weight, kind = self.weights[number], self.routes[number].kind
        if kind not in self._fragments:
            self._fragments[kind] = _intersect(
                weight, self.training.cut_size(weight), self.rollout.cut_size(weight)
            )
        return self._fragments[kind]

    def flows(self, number: int) -> list[Flow]:
        """Who gives the weight's fragments to whom."""
        route = self.routes[number]
        if route not in self._flows:
            held = self.holders(self.training, route.training)
            needed = self.holders(self.rollout, route.rollout)
            by_sources: dict = defaultdict(lambda: defaultdict(list))
            for fragment in self.fragments(number):
                by_sources[fragment.sources][fragment.destination].append(fragment)
            flows = []
            for sources, by_destination in by_sources.items():
                holders = held.ranks[np.isin(held.tp_ranks, sources)]
                some = np.isin(needed.tp_ranks, list(by_destination))
                givers = _choose(holders, needed.ranks[some], self.nodes, route.turn)
                flows.append(Flow(dict(by_destination), needed.ranks[some], needed.tp_ranks[some], givers))
            self._flows[route] = flows
        return self._flows[route]

    def load(self, number: int, parts: int = 1) -> np.ndarray:
        """Bytes that a weight moves on each rank, int64 [5, world_size]: rows STAYS .. FAR_OUT. With `parts`, the most that
        one of its parts moves."""
        key = self.routes[number], parts
        if key not in self._loads:
            self._loads[key] = self._load(number, parts)
        return self._loads[key]

    def crossing(self, number: int, parts: int = 1) -> np.ndarray:
        """Bytes of each rank's messages for a weight or the largest of its parts, sent and received, int64 [world_size]."""
        key = self.routes[number], parts
        if key not in self._crossing:
            self._crossing[key] = self.load(number, parts)[NEAR_IN:].sum(0)
        return self._crossing[key]

    def _load(self, number: int, parts: int) -> np.ndarray:
        size = self.bytes_per_element(self.weights[number])
        load = np.zeros((5, self.world_size), np.int64)
        for flow in self.flows(number):
            of_tp_rank = np.zeros(self.rollout.tp, np.int64)
            for tp_rank, fragments in flow.fragments.items():
                of_tp_rank[tp_rank] = size * sum(_elements_of_part(fragment, parts) for fragment in fragments)
            num_bytes = of_tp_rank[flow.needer_tp_ranks]
            stays = flow.givers == flow.needers
            near = ~stays & (self.nodes[flow.givers] == self.nodes[flow.needers])
            far = ~stays & ~near
            np.add.at(load[STAYS], flow.needers[stays], num_bytes[stays])
            for chosen, row_in, row_out in ((near, NEAR_IN, NEAR_OUT), (far, FAR_IN, FAR_OUT)):
                np.add.at(load[row_in], flow.needers[chosen], num_bytes[chosen])
                np.add.at(load[row_out], flow.givers[chosen], num_bytes[chosen])
        return load


def _kind(weight: Weight) -> tuple:
    names = tuple(re.sub(r"(?<=\.)\d+(?=\.)", "#", name) for name in weight.hf)
    return names, weight.shapes, weight.cut.split, weight.float32


def _intersect(weight: Weight, source_tp: int, destination_tp: int) -> list[Fragment]:
    """Raises ValueError if the training side does not hold every element that the engine needs exactly once."""
    held: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for tp_rank in range(source_tp):
        for piece in weight.megatron_pieces(source_tp, tp_rank):
            held[piece.hf, piece.hf_box].append(tp_rank)
    fragments = []
    for tp_rank in range(destination_tp):
        for piece in weight.vllm_pieces(destination_tp, tp_rank):
            found = []
            for (hf, box), sources in held.items():
                part = _overlap(box, piece.hf_box) if hf == piece.hf else None
                if part is not None:
                    found.append(Fragment(tuple(sources), tp_rank, weight.hf.index(hf), part, _volume(part)))
            if sum(fragment.num_elements for fragment in found) != _volume(piece.hf_box):
                raise ValueError(
                    f"{piece.hf}{list(piece.hf_box)} is not held exactly once over training tp {source_tp}."
                )
            fragments += found
    return fragments


def _choose(holders: np.ndarray, needers: np.ndarray, nodes: np.ndarray, turn: int) -> np.ndarray:
    """A holder for each needer, int64 [len(needers)]: itself, else one of its node, else any; each pool in turn."""
    givers = np.where(np.isin(needers, holders), needers, -1)
    pools = [(holders[nodes[holders] == node], nodes[needers] == node) for node in np.unique(nodes[holders])]
    for pool, reached in [*pools, (holders, np.ones(len(needers), bool))]:
        waiting = np.flatnonzero((givers < 0) & reached)
        givers[waiting] = pool[(np.arange(len(waiting)) + turn) % len(pool)]
    return givers


# Batches -------------------------------------------------------------------------------------------------------------------


def cut_into_batches(routing: Routing, buffer_bytes: int) -> list[tuple[tuple[Span, ...], np.ndarray]]:
    """The spans of each batch, and what the batch moves on each rank, int64 [5, world_size] (an upper bound where weights are
    cut: parts may differ by a row). No rank's messages exceed buffer_bytes, unless one row of each fragment does.

    Weights of different places take turns, so that all ranks send all the time and not one pipeline stage after the other.
    """
    batches, spans = [], []
    total = np.zeros((5, routing.world_size), np.int64)
    filled = np.zeros(routing.world_size, np.int64)
    for span in _spans_in_turn(routing, buffer_bytes):
        more = routing.crossing(span.weight, span.parts)
        if spans and (filled + more).max() > buffer_bytes:
            batches.append((tuple(spans), total))
            spans, total, filled = [], np.zeros_like(total), np.zeros_like(filled)
        spans.append(span)
        total += routing.load(span.weight, span.parts)
        filled += more
    return [*batches, (tuple(spans), total)] if spans else batches


def _spans_in_turn(routing: Routing, buffer_bytes: int) -> list[Span]:
    of_place: dict[Place, list[Span]] = defaultdict(list)
    parts_of: dict[Route, int] = {}
    for number, route in enumerate(routing.routes):
        if route not in parts_of:
            parts_of[route] = _num_parts(routing, number, buffer_bytes // 4)
        of_place[route.training] += [Span(number, part, parts_of[route]) for part in range(parts_of[route])]
    spread = [((i + 0.5) / len(spans), span) for spans in of_place.values() for i, span in enumerate(spans)]
    return [span for _, span in sorted(spread, key=lambda entry: entry[0])]


def _num_parts(routing: Routing, number: int, buffer_bytes: int) -> int:
    """Into how many parts a weight must be cut so that each fits the buffer on every rank; 0 if every rank has its own."""
    most_rows = max(fragment.box[0][1] - fragment.box[0][0] for fragment in routing.fragments(number))
    parts = 1 if routing.crossing(number).any() else 0
    while 0 < parts < most_rows and (largest := routing.crossing(number, parts).max()) > buffer_bytes:
        parts = min(most_rows, max(parts + 1, math.ceil(parts * largest / buffer_bytes)))
    return parts


def _rows_of_part(start: int, stop: int, part: int, parts: int) -> tuple[int, int]:
    return start + (stop - start) * part // parts, start + (stop - start) * (part + 1) // parts


def _elements_of_part(fragment: Fragment, parts: int) -> int:
    """Of the largest part."""
    start, stop = fragment.box[0]
    return fragment.num_elements // (stop - start) * -(-(stop - start) // parts)


# One rank's messages -------------------------------------------------------------------------------------------------------


def plan_of(routing: Routing, batches: Sequence[tuple[Span, ...]], rank: int) -> Plan:
    """What one rank copies, sends and receives."""
    copies: list[Copy] = []
    outgoing: dict[int, list[tuple[int, Region]]] = {}
    incoming: dict[int, list[tuple[int, Region]]] = {}
    for number in range(len(routing.weights)):
        own, outgoing[number], incoming[number] = _regions(routing, number, rank)
        copies += own
    return Plan(
        rank,
        tuple(copies),
        tuple(Batch(s, _messages(routing, s, outgoing), _messages(routing, s, incoming)) for s in batches),
    )


def _regions(routing: Routing, number: int, rank: int):
    """Of one weight: this rank's copies, and (peer, region) of what it sends and receives. A pair of ranks sees its regions
    in the same order on both sides."""
    weight, route = routing.weights[number], routing.routes[number]
    copies, outgoing, incoming = [], [], []
    source = destination = None  # pieces, looked up for the few weights that need them
    for flow in routing.flows(number):
        gets = np.flatnonzero(flow.needers == rank)
        gives = np.flatnonzero(flow.givers == rank)
        if len(gives) and source is None:
            tp_rank = _tp_rank(routing.holders(routing.training, route.training), rank)
            source = weight.megatron_pieces(routing.training.cut_size(weight), tp_rank)
        if len(gets) and destination is None:
            tp_rank = _tp_rank(routing.holders(routing.rollout, route.rollout), rank)
            destination = weight.vllm_pieces(routing.rollout.cut_size(weight), tp_rank)
        for i in gives:
            for fragment in flow.fragments[int(flow.needer_tp_ranks[i])]:
                hf, box = weight.hf[fragment.hf], fragment.box
                local = _local_box(source, hf, box)
                if flow.needers[i] == rank:
                    copies.append(Copy(number, hf, local, _local_box(destination, hf, box)))
                else:
                    outgoing.append((int(flow.needers[i]), Region(number, hf, box, local)))
        for i in gets[flow.givers[gets] != rank]:
            for fragment in flow.fragments[int(flow.needer_tp_ranks[i])]:
                hf, box = weight.hf[fragment.hf], fragment.box
                incoming.append(
                    (int(flow.givers[i]), Region(number, hf, box, _local_box(destination, hf, box)))
                )
    return copies, outgoing, incoming


def _messages(
    routing: Routing, spans: tuple[Span, ...], regions: dict[int, list[tuple[int, Region]]]
) -> tuple[Message, ...]:
    by_peer: dict[int, list[Region]] = defaultdict(list)
    for span in spans:
        for peer, region in regions[span.weight]:
            first, last = region.box[0]
            start, stop = _rows_of_part(first, last, span.part, span.parts)
            if start < stop:
                by_peer[peer].append(_rows_of(region, start - first, stop - first))
    messages = []
    for peer in sorted(by_peer):
        # Elements of 4 bytes first: each then lies at a multiple of its size.
        packed = sorted(by_peer[peer], key=lambda region: not routing.weights[region.weight].float32)
        sizes = (
            _volume(region.box) * routing.bytes_per_element(routing.weights[region.weight])
            for region in packed
        )
        messages.append(Message(peer, tuple(packed), sum(sizes)))
    return tuple(messages)


def _rows_of(region: Region, start: int, stop: int) -> Region:
    """Rows start..stop of the region; the local box may have a leading dimension of experts on top."""
    if (start, stop) == (0, region.box[0][1] - region.box[0][0]):
        return region
    extra = len(region.local) - len(region.box)

    def cut(box: Box, dim: int) -> Box:
        return (*box[:dim], (box[dim][0] + start, box[dim][0] + stop), *box[dim + 1 :])

    return Region(region.weight, region.hf, cut(region.box, 0), cut(region.local, extra))


def _tp_rank(holders, rank: int) -> int:
    return int(holders.tp_ranks[holders.ranks == rank][0])


def _local_box(pieces: list[Piece], hf: str, box: Box) -> Box:
    """Where a box of a Hugging Face tensor lies in the parameter that the pieces describe."""
    for piece in pieces:
        if piece.hf == hf and _overlap(piece.hf_box, box) == box:
            extra = len(piece.local_box) - len(box)  # a parameter of all experts has one dimension more
            moved = (
                (local[0] + part[0] - whole[0], local[0] + part[1] - whole[0])
                for local, part, whole in zip(piece.local_box[extra:], box, piece.hf_box)
            )
            return (*piece.local_box[:extra], *moved)
    raise AssertionError(f"{hf}{list(box)} lies in no piece")


def _overlap(a: Box, b: Box) -> Box | None:
    box = tuple(
        (max(start, first), min(stop, last)) for (start, stop), (first, last) in zip(a, b, strict=True)
    )
    return box if all(start < stop for start, stop in box) else None


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
