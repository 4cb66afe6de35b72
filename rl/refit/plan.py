"""The plan of a refit: which rank sends which part of each weight to which rank.

Trainer and engine hold boxes of the same Hugging Face tensors (`rl.models.layout`). Their intersections are
fragments. Each fragment that a rank needs has exactly one source: the rank itself if it trains that part,
else a rank of its node that holds it, else any rank that holds it; several candidates take turns. A rank
therefore receives, exactly once, what its engine needs and its trainer does not hold.

The plan is plain data, computed without communication. Every rank computes the same routes and batches, and
then its own messages. A `kind` is a set of weights that are split identically and whose names differ only in
the numbers of layer and expert. `parts` is the number of parts into which a weight is divided to fit the
buffer.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from rl.models.boxes import Box, moved, overlap, volume
from rl.models.layout import Piece, Weight
from rl.models.placement import Holders, Place, RolloutPlacement, TrainingPlacement

STAYS, NEAR_IN, FAR_IN, NEAR_OUT, FAR_OUT = range(5)
"""Rows of a load, bytes per rank: copied within the rank, and received and sent within and between nodes."""


@dataclass(frozen=True)
class Region:
    """A box of the Hugging Face tensor `hf`, and the box of this rank's parameter with the same elements."""

    weight: int
    """Index in the list of weights."""
    hf: str
    box: Box
    local: Box


@dataclass(frozen=True)
class Copy:
    """A box that this rank both trains and generates with; it needs no transport."""

    weight: int
    hf: str
    source: Box
    """Box of the training parameter."""
    destination: Box
    """Box of the engine's parameter."""


@dataclass(frozen=True)
class Message:
    """Regions sent to or received from one peer in one batch, packed in this order."""

    peer: int
    regions: tuple[Region, ...]
    num_bytes: int


@dataclass(frozen=True)
class Span:
    """Part `part` of a weight: each of its fragments is divided by rows into `parts` about equal parts."""

    weight: int
    part: int
    parts: int


@dataclass(frozen=True)
class MessageBatch:
    """Messages exchanged together.

    Every rank has the same spans in the same batch, so that the messages of peers match.
    """

    spans: tuple[Span, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers that hold its messages."""
        return sum(message.num_bytes for message in (*self.sends, *self.receives))


@dataclass(frozen=True)
class RefitPlan:
    """One rank's part of a refit."""

    rank: int
    copies: tuple[Copy, ...]
    batches: tuple[MessageBatch, ...]

    @property
    def peak_bytes(self) -> int:
        """Bytes of the buffers of the largest batch."""
        return max((batch.num_bytes for batch in self.batches), default=0)

    @property
    def bytes_received(self) -> int:
        return sum(message.num_bytes for batch in self.batches for message in batch.receives)

    @property
    def bytes_sent(self) -> int:
        return sum(message.num_bytes for batch in self.batches for message in batch.sends)


# Routes: the sender of every fragment, for all ranks at once ------------------------------------------------


@dataclass(frozen=True)
class Fragment:
    """A part of a weight that one tensor parallel rank in generation needs from training.

    It is a box of the `hf`-th Hugging Face tensor of the weight. Each rank of `sources` holds the whole box.
    """

    sources: tuple[int, ...]
    """Tensor parallel ranks in training."""
    destination: int
    """Tensor parallel rank in generation."""
    hf: int
    box: Box
    num_elements: int


@dataclass(frozen=True, eq=False)
class Kind:
    """Weights that are split identically."""

    number: int
    element_bytes: int
    fragments: list[Fragment]


@dataclass(frozen=True, eq=False)
class Route:
    """Properties of a weight that determine its senders and receivers."""

    kind: Kind
    training: Place
    rollout: Place
    turn: int
    """Number of candidate senders to skip."""


@dataclass(frozen=True)
class Flow:
    """Senders and receivers of the fragments that the same training ranks hold, int64 [n] each.

    `givers[i]` sends to `needers[i]`, whose tensor parallel rank in generation is `needer_tp_ranks[i]`.
    """

    fragments: dict[int, list[Fragment]]
    """Fragments by the receiver's tensor parallel rank."""
    needers: np.ndarray
    needer_tp_ranks: np.ndarray
    givers: np.ndarray


class Routing:
    """The senders of all fragments of all weights, for all ranks.

    Weights of one kind and place share the computation.

    Args:
        node_of: maps a rank to its node.
        itemsize: bytes of an element of a weight that is not `float32`.
    """

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
                f"training has {training.world_size} ranks and generation {rollout.world_size}; they must "
                "have the same world."
            )
        self.weights, self.training, self.rollout, self.itemsize = weights, training, rollout, itemsize
        self.world_size = training.world_size
        self.nodes = np.array([node_of(rank) for rank in range(self.world_size)])
        self.held: Callable[[Place], Holders] = functools.cache(training.holders)
        """Ranks that hold a place in training."""
        self.needed: Callable[[Place], Holders] = functools.cache(rollout.holders)
        """Ranks that hold a place in generation."""
        self.flows: Callable[[Route], list[Flow]] = functools.cache(self._flows)
        """Flows of a weight."""
        self.load: Callable[[Route, int], np.ndarray] = functools.cache(self._load)
        """Bytes that the largest of `parts` parts of a weight moves on each rank, int64 [5, world_size].

        The rows are STAYS .. FAR_OUT.
        """
        self.crossing: Callable[[Route, int], np.ndarray] = functools.cache(self._crossing)
        """Bytes of each rank's messages for that part, sent and received, int64 [world_size]."""
        self.routes = self._routes()
        """Route of each weight; weights with equal properties share one object."""

    def _routes(self) -> list[Route]:
        out: list[Route] = []
        kinds: dict[tuple, Kind] = {}
        known: dict[tuple, Route] = {}
        seen: Counter = Counter()
        for weight in self.weights:
            key = _kind(weight)
            if key not in kinds:
                cuts = self.training.cut_size(weight), self.rollout.cut_size(weight)
                element_bytes = weight.bytes_per_element(self.itemsize)
                kinds[key] = Kind(len(kinds), element_bytes, _intersect(weight, *cuts))
            kind, places = kinds[key], (self.training.place(weight), self.rollout.place(weight))
            # Equal layers, and the weights of one layer, use different replicas as senders, to balance load.
            turn = (kind.number + seen[kind, places]) % len(self.held(places[0]).ranks)
            seen[kind, places] += 1
            out.append(known.setdefault((kind, places, turn), Route(kind, *places, turn)))
        return out

    def _flows(self, route: Route) -> list[Flow]:
        held, needed = self.held(route.training), self.needed(route.rollout)
        by_sources: dict = defaultdict(lambda: defaultdict(list))
        for fragment in route.kind.fragments:
            by_sources[fragment.sources][fragment.destination].append(fragment)
        flows = []
        for sources, by_destination in by_sources.items():
            holders = held.ranks[np.isin(held.tp_ranks, sources)]
            some = np.isin(needed.tp_ranks, list(by_destination))
            givers = _choose(holders, needed.ranks[some], self.nodes, route.turn)
            flows.append(Flow(dict(by_destination), needed.ranks[some], needed.tp_ranks[some], givers))
        return flows

    def _load(self, route: Route, parts: int) -> np.ndarray:
        load = np.zeros((5, self.world_size), np.int64)
        for flow in self.flows(route):
            of_tp_rank = np.zeros(self.rollout.tp, np.int64)
            for tp_rank, fragments in flow.fragments.items():
                elements = sum(_elements_of_part(fragment, parts) for fragment in fragments)
                of_tp_rank[tp_rank] = route.kind.element_bytes * elements
            num_bytes = of_tp_rank[flow.needer_tp_ranks]
            stays = flow.givers == flow.needers
            near = ~stays & (self.nodes[flow.givers] == self.nodes[flow.needers])
            far = ~stays & ~near
            np.add.at(load[STAYS], flow.needers[stays], num_bytes[stays])
            for some, row_in, row_out in ((near, NEAR_IN, NEAR_OUT), (far, FAR_IN, FAR_OUT)):
                np.add.at(load[row_in], flow.needers[some], num_bytes[some])
                np.add.at(load[row_out], flow.givers[some], num_bytes[some])
        return load

    def _crossing(self, route: Route, parts: int) -> np.ndarray:
        return self.load(route, parts)[NEAR_IN:].sum(0)


def _kind(weight: Weight) -> tuple:
    names = tuple(re.sub(r"(?<=\.)\d+(?=\.)", "#", name) for name in weight.hf)
    return names, weight.shapes, weight.cut.split, weight.float32


def _intersect(weight: Weight, source_tp: int, destination_tp: int) -> list[Fragment]:
    """Return every fragment of the weight.

    Raises ValueError unless training holds every needed element exactly once.
    """
    held: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for tp_rank in range(source_tp):
        for piece in weight.megatron_pieces(source_tp, tp_rank):
            held[piece.hf, piece.hf_box].append(tp_rank)
    fragments = []
    for tp_rank in range(destination_tp):
        for piece in weight.vllm_pieces(destination_tp, tp_rank):
            found = []
            for (hf, box), sources in held.items():
                part = overlap(box, piece.hf_box) if hf == piece.hf else None
                if part is not None:
                    found.append(Fragment(tuple(sources), tp_rank, weight.hf.index(hf), part, volume(part)))
            if sum(fragment.num_elements for fragment in found) != volume(piece.hf_box):
                raise ValueError(
                    f"{piece.hf}{list(piece.hf_box)} is not held exactly once over training tp {source_tp}."
                )
            fragments += found
    return fragments


def _choose(holders: np.ndarray, needers: np.ndarray, nodes: np.ndarray, turn: int) -> np.ndarray:
    """Return a holder for each needer, int64 [len(needers)].

    It is the needer itself if it is a holder, else a holder on its node, else any holder. Among several
    candidates, the needers take the next one in turn, starting at `turn`.
    """
    givers = np.where(np.isin(needers, holders), needers, -1)
    pools = [(holders[nodes[holders] == node], nodes[needers] == node) for node in np.unique(nodes[holders])]
    for pool, reached in [*pools, (holders, np.ones(len(needers), bool))]:
        waiting = np.flatnonzero((givers < 0) & reached)
        givers[waiting] = pool[(np.arange(len(waiting)) + turn) % len(pool)]
    return givers


# Batches ----------------------------------------------------------------------------------------------------


def cut_into_batches(routing: Routing, buffer_bytes: int) -> list[tuple[tuple[Span, ...], np.ndarray]]:
    """Return the spans of each batch and the bytes that it moves on each rank, int64 [5, world_size].

    If weights are divided, the bytes are an upper bound, because parts may differ by a row. No rank's
    messages exceed buffer_bytes, unless one row of each fragment does. Weights of different places alternate,
    so that all pipeline stages send at the same time.
    """
    batches = []
    spans: list[Span] = []
    total = np.zeros((5, routing.world_size), np.int64)
    filled = np.zeros(routing.world_size, np.int64)
    for span in _spans_in_turn(routing, buffer_bytes):
        route = routing.routes[span.weight]
        more = routing.crossing(route, span.parts)
        if spans and (filled + more).max() > buffer_bytes:
            batches.append((tuple(spans), total))
            spans, total, filled = [], np.zeros_like(total), np.zeros_like(filled)
        spans.append(span)
        total += routing.load(route, span.parts)
        filled += more
    return [*batches, (tuple(spans), total)] if spans else batches


def _spans_in_turn(routing: Routing, buffer_bytes: int) -> list[Span]:
    of_place: dict[Place, list[Span]] = defaultdict(list)
    parts_of = {
        route: _num_parts(routing, route, buffer_bytes // 4) for route in dict.fromkeys(routing.routes)
    }
    for number, route in enumerate(routing.routes):
        of_place[route.training] += [Span(number, part, parts_of[route]) for part in range(parts_of[route])]
    spread = [((i + 0.5) / len(spans), span) for spans in of_place.values() for i, span in enumerate(spans)]
    return [span for _, span in sorted(spread, key=lambda entry: entry[0])]


def _num_parts(routing: Routing, route: Route, buffer_bytes: int) -> int:
    """Return the number of parts of a weight such that each part fits the buffer on every rank.

    Returns 0 if no rank receives any of the weight.
    """
    most_rows = max(fragment.box[0][1] - fragment.box[0][0] for fragment in route.kind.fragments)
    parts = 1 if routing.crossing(route, 1).any() else 0
    while 0 < parts < most_rows and (largest := routing.crossing(route, parts).max()) > buffer_bytes:
        parts = min(most_rows, max(parts + 1, ceil(parts * largest / buffer_bytes)))
    return parts


def _elements_of_part(fragment: Fragment, parts: int) -> int:
    """Return the number of elements of the largest part."""
    start, stop = fragment.box[0]
    return fragment.num_elements // (stop - start) * -(-(stop - start) // parts)


# One rank's messages ----------------------------------------------------------------------------------------


def plan_of(routing: Routing, batches: Sequence[tuple[Span, ...]], rank: int) -> RefitPlan:
    """Return what one rank copies, sends and receives.

    Not collective; equal inputs on all ranks give matching plans.

    batches: the spans of each batch, from `cut_into_batches`.
    """
    copies: list[Copy] = []
    outgoing: dict[int, list[tuple[int, Region]]] = {}
    incoming: dict[int, list[tuple[int, Region]]] = {}
    for number in range(len(routing.weights)):
        own, outgoing[number], incoming[number] = _regions(routing, number, rank)
        copies += own
    planned = (
        MessageBatch(s, _messages(routing, s, outgoing), _messages(routing, s, incoming)) for s in batches
    )
    return RefitPlan(rank, tuple(copies), tuple(planned))


def _regions(routing: Routing, number: int, rank: int):
    """Return (copies, sends, receives) of one weight on this rank; sends and receives are (peer, region).

    Both ranks of a pair list their regions in the same order.
    """
    weight, route = routing.weights[number], routing.routes[number]
    copies, outgoing, incoming = [], [], []

    @functools.cache
    def source() -> list[Piece]:
        tp_rank = _tp_rank(routing.held(route.training), rank)
        return weight.megatron_pieces(routing.training.cut_size(weight), tp_rank)

    @functools.cache
    def destination() -> list[Piece]:
        return weight.vllm_pieces(
            routing.rollout.cut_size(weight), _tp_rank(routing.needed(route.rollout), rank)
        )

    for flow in routing.flows(route):
        gets, gives = np.flatnonzero(flow.needers == rank), np.flatnonzero(flow.givers == rank)
        for i in gives:
            peer = int(flow.needers[i])
            for fragment in flow.fragments[int(flow.needer_tp_ranks[i])]:
                hf, box = weight.hf[fragment.hf], fragment.box
                local = _local_box(source(), hf, box)
                if peer == rank:
                    copies.append(Copy(number, hf, local, _local_box(destination(), hf, box)))
                else:
                    outgoing.append((peer, Region(number, hf, box, local)))
        for i in gets[flow.givers[gets] != rank]:
            for fragment in flow.fragments[int(flow.needer_tp_ranks[i])]:
                hf, box = weight.hf[fragment.hf], fragment.box
                incoming.append(
                    (int(flow.givers[i]), Region(number, hf, box, _local_box(destination(), hf, box)))
                )
    return copies, outgoing, incoming


def _messages(
    routing: Routing, spans: tuple[Span, ...], regions: dict[int, list[tuple[int, Region]]]
) -> tuple[Message, ...]:
    by_peer: dict[int, list[Region]] = defaultdict(list)
    for span in spans:
        for peer, region in regions[span.weight]:
            first, last = region.box[0]
            start, stop = ((last - first) * part // span.parts for part in (span.part, span.part + 1))
            if start < stop:
                by_peer[peer].append(_rows_of(region, start, stop))

    def element_bytes(region: Region) -> int:
        return routing.routes[region.weight].kind.element_bytes

    messages = []
    for peer in sorted(by_peer):
        # Float32 elements first, so that each region begins at a multiple of its element size.
        packed = sorted(by_peer[peer], key=lambda region: not routing.weights[region.weight].float32)
        num_bytes = sum(volume(region.box) * element_bytes(region) for region in packed)
        messages.append(Message(peer, tuple(packed), num_bytes))
    return tuple(messages)


def _rows_of(region: Region, start: int, stop: int) -> Region:
    """Return rows start..stop of the region.

    The local box may have an additional first dimension of experts.
    """
    if (start, stop) == (0, region.box[0][1] - region.box[0][0]):
        return region

    def cut(box: Box, dim: int) -> Box:
        return (*box[:dim], (box[dim][0] + start, box[dim][0] + stop), *box[dim + 1 :])

    extra = len(region.local) - len(region.box)
    return Region(region.weight, region.hf, cut(region.box, 0), cut(region.local, extra))


def _tp_rank(holders: Holders, rank: int) -> int:
    return int(holders.tp_ranks[holders.ranks == rank][0])


def _local_box(pieces: list[Piece], hf: str, box: Box) -> Box:
    """Return where a box of a Hugging Face tensor lies in the parameter that the pieces describe."""
    for piece in pieces:
        if piece.hf == hf and overlap(piece.hf_box, box) == box:
            extra = len(piece.local_box) - len(box)  # a parameter of all experts has one dimension more
            return (*piece.local_box[:extra], *moved(box, piece.hf_box, piece.local_box[extra:]))
    raise AssertionError(f"{hf}{list(box)} lies in no piece")
