"""The plan of a refit: the sender and the receivers of each part of each weight.

Trainer and engine hold boxes of the same Hugging Face tensors (`rl.models.layout`), on the same ranks of the
job or on two sets without a common rank (`TrainingPlacement.ranks`). The intersections of the boxes are
fragments. Each fragment that a rank needs has exactly one source: the rank itself if it trains that part,
else a rank of its node that holds it, else any rank that holds it. A rank therefore receives, exactly once,
what its engine needs and its trainer does not hold. If there are several candidates, the load is spread over
them, within the limit on the number of a rank's partners (`SENDERS`).

The plan is plain data, computed without communication. Every rank computes the same routes and batches, and
then its own messages. Three terms:

- A `kind` is a set of weights that are split identically and whose names differ only in the numbers of layer
  and expert: for example, the fused qkv weights of all layers.
- A `stream` is a choice of senders that many weights share. If several engine replicas receive a stream from
  the same rank, their messages are identical, and the sender packs each message once.
- `parts` is the number of parts into which a weight is divided so that each part fits the buffer.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

from rl.models.boxes import Box, overlap, volume
from rl.models.layout import Piece, Weight
from rl.models.placement import Holders, Place, RolloutPlacement, TrainingPlacement, job_ranks

SENDERS = 64
"""Maximum number of senders to one rank, unless the weights that it needs are on more ranks.

NCCL opens a connection for each partner.
"""
STAYS, NEAR_IN, FAR_IN, NEAR_OUT, FAR_OUT = range(5)
"""Rows of a load, in bytes per rank: copied within the rank; received within and between nodes; sent within
and between nodes."""


class Region(NamedTuple):
    """A box of the Hugging Face tensor `hf`, and the box of this rank's parameter with the same elements."""

    weight: int
    """Index in the list of weights."""
    hf: str
    box: Box
    local: Box


class Copy(NamedTuple):
    """A box that this rank both trains and generates with; it needs no transport."""

    weight: int
    hf: str
    source: Box
    """Box of the training parameter."""
    destination: Box
    """Box of the engine's parameter."""


@dataclass(frozen=True)
class Message:
    """Regions of one stream in one batch, packed in this order.

    Both ranks of a pair order their messages identically.
    """

    peers: tuple[int, ...]
    """Receivers of the message, or its one sender."""
    regions: tuple[Region, ...]
    num_bytes: int


class Span(NamedTuple):
    """Part `part` of a weight. Each fragment of it is divided by rows into `parts` about equal parts."""

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
        return sum(
            message.num_bytes * len(message.peers) for batch in self.batches for message in batch.sends
        )


# Routes: the sender of every fragment, for all ranks at once ------------------------------------------------


@dataclass(frozen=True)
class Fragment:
    """A part of a weight that a tensor parallel rank in generation needs from training.

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
class SplitKind:
    """Weights that are split identically."""

    number: int
    element_bytes: int
    fragments: list[Fragment]


@dataclass(frozen=True, eq=False)
class Stream:
    """Senders and receivers of fragments that the same training ranks hold and the same ranks need.

    int64 [n] each: `givers[i]` sends to `needers[i]`, which has tensor parallel rank `needer_tp_ranks[i]` in
    generation. No rank occurs twice in `needers`.
    """

    number: int
    """Index among all streams; it determines the order of the messages between two ranks."""
    needers: np.ndarray
    needer_tp_ranks: np.ndarray
    givers: np.ndarray
    crosses: np.ndarray
    """Whether giver and needer differ, bool [n]."""
    packers: np.ndarray
    """Rank that packs each message, int64 [m]: one message per tensor parallel rank that receives."""
    packed_tp_ranks: np.ndarray
    """Tensor parallel rank of the receivers of each of these messages, int64 [m]."""


class Flow(NamedTuple):
    """The fragments of a weight that a stream carries."""

    stream: Stream
    fragments: dict[int, list[Fragment]]
    """Fragments by the receiver's tensor parallel rank."""


@dataclass(frozen=True, eq=False)
class Route:
    """Properties of a weight that determine its senders and receivers."""

    kind: SplitKind
    training: Place
    rollout: Place
    turn: int
    """Number of candidate senders to skip."""


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
        ours, theirs = set(job_ranks(training)), set(job_ranks(rollout))
        if ours & theirs and ours != theirs:
            raise ValueError(
                f"training has {len(ours)} ranks and generation {len(theirs)}, of which {len(ours & theirs)} "
                "are in both; they must have the same ranks or none in common."
            )
        self.weights, self.training, self.rollout, self.itemsize = weights, training, rollout, itemsize
        self.world_size = 1 + max(ours | theirs)
        """Ranks of the job, up to the last that trains or generates."""
        self.nodes = np.array([node_of(rank) for rank in range(self.world_size)])
        self.held: Callable[[Place], Holders] = functools.cache(training.holders)
        """Ranks that hold a place in training."""
        self.needed: Callable[[Place], Holders] = functools.cache(rollout.holders)
        """Ranks that hold a place in generation."""
        self.crossing: Callable[[Route, int], np.ndarray] = functools.cache(self._crossing)
        """Buffer bytes of each rank's messages for the largest of `parts` parts of a weight.

        int64 [world_size], sent and received.
        """
        self.routes = self._routes()
        """Route of each weight; weights with equal properties share one object."""
        self._stream_of: dict[tuple, Stream] = {}
        self._streams: dict[tuple, Stream] = {}
        self.flows: dict[Route, list[Flow]] = {route: self._flows(route) for route in self.different_routes}
        """Flows of a weight by its route."""

    @property
    def different_routes(self) -> list[Route]:
        """Routes in the order of the first weight that takes each."""
        return list(dict.fromkeys(self.routes))

    @property
    def streams(self) -> list[Stream]:
        return list(self._streams.values())

    def _routes(self) -> list[Route]:
        places = [(self.training.place(weight), self.rollout.place(weight)) for weight in self.weights]
        turns = max(1, SENDERS // max(1, len({training for training, _ in places})))
        out: list[Route] = []
        kinds: dict[tuple, SplitKind] = {}
        known: dict[tuple, Route] = {}
        seen: Counter = Counter()
        for weight, place in zip(self.weights, places):
            key = weight.megatron, weight.shapes, weight.cut.split, weight.float32
            if key not in kinds:
                element_bytes = weight.bytes_per_element(self.itemsize)
                fragments = _intersect(weight, self.training.cut_size(weight), self.rollout)
                kinds[key] = SplitKind(len(kinds), element_bytes, fragments)
            kind = kinds[key]
            # Equal layers, and the weights of one layer, use different replicas as senders, to balance load.
            turn = (kind.number + seen[kind, place]) % min(turns, len(self.held(place[0]).ranks))
            seen[kind, place] += 1
            if (kind, place, turn) not in known:
                known[kind, place, turn] = Route(kind, *place, turn)
            out.append(known[kind, place, turn])
        return out

    def _flows(self, route: Route) -> list[Flow]:
        by_sources: dict = defaultdict(lambda: defaultdict(list))
        for fragment in route.kind.fragments:
            by_sources[fragment.sources][fragment.destination].append(fragment)
        return [
            Flow(self._stream(route, sources, tuple(by_destination)), dict(by_destination))
            for sources, by_destination in by_sources.items()
        ]

    def _stream(self, route: Route, sources: tuple[int, ...], destinations: tuple[int, ...]) -> Stream:
        key = route.training, route.rollout, route.turn, sources, destinations
        if key in self._stream_of:
            return self._stream_of[key]
        held, needed = self.held(route.training), self.needed(route.rollout)
        holders = held.ranks[np.isin(held.tp_ranks, sources)]
        some = np.isin(needed.tp_ranks, destinations)
        needers, tp_ranks = needed.ranks[some], needed.tp_ranks[some]
        givers = _choose(holders, needers, self.nodes, route.turn)
        content = needers.tobytes(), tp_ranks.tobytes(), givers.tobytes()
        if content not in self._streams:
            crosses = givers != needers
            packed = np.unique(givers[crosses] * self.rollout.tp + tp_ranks[crosses])
            self._streams[content] = Stream(
                len(self._streams), needers, tp_ranks, givers, crosses, *divmod(packed, self.rollout.tp)
            )
        self._stream_of[key] = self._streams[content]
        return self._streams[content]

    def _crossing(self, route: Route, parts: int) -> np.ndarray:
        out = np.zeros(self.world_size, np.int64)
        for flow in self.flows[route]:
            stream, num_bytes = flow.stream, self._bytes_by_tp_rank(route, flow, parts)
            out[stream.needers] += num_bytes[stream.needer_tp_ranks] * stream.crosses
            np.add.at(out, stream.packers, num_bytes[stream.packed_tp_ranks])
        return out

    def load(self, route: Route, parts: int) -> np.ndarray:
        """Return the bytes that the largest of `parts` parts of a weight moves on each rank.

        int64 [5, world_size]; the rows are STAYS .. FAR_OUT.
        """
        load = np.zeros((5, self.world_size), np.int64)
        for flow in self.flows[route]:
            stream = flow.stream
            num_bytes = self._bytes_by_tp_rank(route, flow, parts)[stream.needer_tp_ranks]
            near = stream.crosses & (self.nodes[stream.givers] == self.nodes[stream.needers])
            far = stream.crosses & ~near
            load[STAYS, stream.needers] += num_bytes * ~stream.crosses
            for some, row_in, row_out in ((near, NEAR_IN, NEAR_OUT), (far, FAR_IN, FAR_OUT)):
                load[row_in, stream.needers] += num_bytes * some
                np.add.at(load[row_out], stream.givers, num_bytes * some)
        return load

    def _bytes_by_tp_rank(self, route: Route, flow: Flow, parts: int) -> np.ndarray:
        """Return the bytes that each tensor parallel rank in generation needs of a flow, int64 [tp]."""
        out = np.zeros(self.rollout.tp, np.int64)
        for tp_rank, fragments in flow.fragments.items():
            elements = sum(_elements_of_part(fragment, parts) for fragment in fragments)
            out[tp_rank] = route.kind.element_bytes * elements
        return out


def _intersect(weight: Weight, source_tp: int, rollout: RolloutPlacement) -> list[Fragment]:
    """Return every fragment of the weight.

    Raises ValueError unless training holds every needed element exactly once.
    """
    held: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for tp_rank in range(source_tp):
        for piece in weight.megatron_pieces(source_tp, tp_rank):
            held[piece.hf, piece.hf_box].append(tp_rank)
    fragments = []
    for tp_rank in range(rollout.cut_size(weight)):
        for piece in rollout.pieces(weight, tp_rank):
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

    A needer that is a holder gets itself. Another needer gets a holder on its node or, if there is none, any
    holder. Needers are spread over several candidates: for example, two needers on a node with the holders 0
    to 3 receive from 0 and 2. If the needers do not divide evenly, the first candidate is shifted by `turn`.
    """
    givers = np.where(np.isin(needers, holders), needers, -1)
    pools = [(holders[nodes[holders] == node], nodes[needers] == node) for node in np.unique(nodes[holders])]
    for pool, reached in [*pools, (holders, np.ones(len(needers), bool))]:
        waiting = np.flatnonzero((givers < 0) & reached)
        apart = max(1, len(pool) // max(1, len(waiting)))
        shift = turn if len(waiting) % len(pool) else 0
        givers[waiting] = pool[(np.arange(len(waiting)) * apart + shift) % len(pool)]
    return givers


# Batches ----------------------------------------------------------------------------------------------------


def cut_into_batches(routing: Routing, buffer_bytes: int) -> list[tuple[Span, ...]]:
    """Return the spans of each batch.

    No rank's messages exceed buffer_bytes, unless one row of each fragment already exceeds buffer_bytes.
    Weights of different places alternate, so that all pipeline stages send at the same time.
    """
    batches = []
    spans: list[Span] = []
    filled = np.zeros(routing.world_size, np.int64)
    for span in _spans_in_turn(routing, buffer_bytes):
        more = routing.crossing(routing.routes[span.weight], span.parts)
        filled += more
        if spans and filled.max() > buffer_bytes:
            batches.append(tuple(spans))
            spans, filled = [], more.copy()
        spans.append(span)
    return [*batches, tuple(spans)] if spans else batches


def _spans_in_turn(routing: Routing, buffer_bytes: int) -> list[Span]:
    of_place: dict[Place, list[Span]] = defaultdict(list)
    parts_of = {route: _num_parts(routing, route, buffer_bytes // 4) for route in routing.different_routes}
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


@dataclass(frozen=True)
class Role:
    """The part of one rank in a stream."""

    giver: int | None
    """The rank that sends to it: itself if it holds the fragments; None if it needs no fragments."""
    tp_rank: int
    """Its tensor parallel rank in generation, if it needs the fragments."""
    peers: dict[int, tuple[int, ...]]
    """Its receivers, by their tensor parallel rank in generation."""


Key = tuple[Stream, int, tuple[int, ...]]
"""Stream, receivers' tensor parallel rank in generation, and peers of a message."""


def plan_of(routing: Routing, batches: Sequence[tuple[Span, ...]], rank: int) -> RefitPlan:
    """Return what one rank copies, sends and receives.

    Not collective; equal inputs on all ranks give matching plans.

    batches: the spans of each batch, from `cut_into_batches`.
    """
    roles = {stream: _role(stream, rank) for stream in routing.streams}
    boxes: dict[tuple[SplitKind, bool], dict[int, Box]] = {}
    copies: list[Copy] = []
    outgoing: list[list[tuple[Key, Region]]] = []
    incoming: list[list[tuple[Key, Region]]] = []
    for number in range(len(routing.weights)):
        own, sends, receives = _regions(routing, roles, boxes, number, rank)
        copies += own
        outgoing.append(sends)
        incoming.append(receives)
    planned = (
        MessageBatch(s, _messages(routing, s, outgoing), _messages(routing, s, incoming)) for s in batches
    )
    return RefitPlan(rank, tuple(copies), tuple(planned))


def _role(stream: Stream, rank: int) -> Role:
    gets = np.flatnonzero(stream.needers == rank)
    gives = np.flatnonzero((stream.givers == rank) & stream.crosses)
    peers: dict[int, list[int]] = defaultdict(list)
    for tp_rank, peer in zip(stream.needer_tp_ranks[gives].tolist(), stream.needers[gives].tolist()):
        peers[tp_rank].append(peer)
    by_tp_rank = {tp_rank: tuple(ranks) for tp_rank, ranks in peers.items()}
    if not len(gets):
        return Role(None, -1, by_tp_rank)
    return Role(int(stream.givers[gets[0]]), int(stream.needer_tp_ranks[gets[0]]), by_tp_rank)


def _regions(
    routing: Routing, roles: dict[Stream, Role], boxes: dict, number: int, rank: int
) -> tuple[list[Copy], list[tuple[Key, Region]], list[tuple[Key, Region]]]:
    """Return (copies, sends, receives) of one weight on this rank; sends and receives are (key, region).

    Both ranks of a pair list their regions in the same order.

    boxes: cache of local boxes by (kind, whether in training) and id of the fragment; filled here.
    """
    weight, route = routing.weights[number], routing.routes[number]

    def region(fragment: Fragment, in_training: bool) -> Region:
        known = boxes.setdefault((route.kind, in_training), {})
        hf, box = weight.hf[fragment.hf], fragment.box
        if id(fragment) not in known:
            known[id(fragment)] = _local_box(_pieces(routing, number, rank, in_training), hf, box)
        local = known[id(fragment)]
        if weight.expert is not None and len(local) > len(box):  # a parameter of all experts
            place = routing.rollout.local_expert(weight.expert)
            local = ((place, place + 1), *local[1:])
        return Region(number, hf, box, local)

    copies: list[Copy] = []
    outgoing: list[tuple[Key, Region]] = []
    incoming: list[tuple[Key, Region]] = []
    for stream, by_tp_rank in routing.flows[route]:
        role = roles[stream]
        for tp_rank, peers in role.peers.items():
            key = stream, tp_rank, peers
            outgoing += [(key, region(fragment, True)) for fragment in by_tp_rank[tp_rank]]
        if role.giver == rank:
            for fragment in by_tp_rank[role.tp_rank]:
                source, destination = region(fragment, True), region(fragment, False)
                copies.append(Copy(number, source.hf, source.local, destination.local))
        elif role.giver is not None:
            key = stream, role.tp_rank, (role.giver,)
            incoming += [(key, region(fragment, False)) for fragment in by_tp_rank[role.tp_rank]]
    return copies, outgoing, incoming


def _pieces(routing: Routing, number: int, rank: int, in_training: bool) -> list[Piece]:
    """Return the pieces of a weight on this rank, which must hold it in training or in generation."""
    weight, route = routing.weights[number], routing.routes[number]
    if in_training:
        tp_rank = _tp_rank(routing.held(route.training), rank)
        return weight.megatron_pieces(routing.training.cut_size(weight), tp_rank)
    return routing.rollout.pieces(weight, _tp_rank(routing.needed(route.rollout), rank))


def _messages(
    routing: Routing, spans: tuple[Span, ...], regions: list[list[tuple[Key, Region]]]
) -> tuple[Message, ...]:
    packed: dict[Key, list[Region]] = defaultdict(list)
    for span in spans:
        for key, region in regions[span.weight]:
            first, last = region.box[0]
            start, stop = ((last - first) * part // span.parts for part in (span.part, span.part + 1))
            if start < stop:
                packed[key].append(_rows_of(region, start, stop))
    return tuple(
        Message(key[2], *_in_order(routing, packed[key]))
        for key in sorted(packed, key=lambda key: (key[0].number, key[1]))
    )


def _in_order(routing: Routing, regions: list[Region]) -> tuple[tuple[Region, ...], int]:
    """Return the regions in the order of the message, and the message's bytes.

    Float32 elements come first, so that each region begins at a multiple of its element size.
    """
    ordered = sorted(regions, key=lambda region: not routing.weights[region.weight].float32)
    return tuple(ordered), sum(
        volume(region.box) * routing.routes[region.weight].kind.element_bytes for region in ordered
    )


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
    """Return the box of the parameter, described by its pieces, that holds a box of a Hugging Face tensor."""
    for piece in pieces:
        if piece.hf == hf and overlap(piece.hf_box, box) == box:
            return piece.local(box)
    raise AssertionError(f"{hf}{list(box)} lies in no piece")
