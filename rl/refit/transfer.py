"""Execution of a refit plan: copies within the rank, then batches of packed messages.

`compare`, the check of a refit, exchanges checksums in the same way. Messages are point-to-point, over gloo
for CPU tensors and NCCL for CUDA tensors. The ranks of a plan are the ranks of the given group, by default of
the world. All of them must call these functions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from operator import add
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rl.models.boxes import index
from rl.refit.plan import Copy, Message, MessageBatch, RefitPlan, Region
from rl.runtime import tracing
from rl.runtime.checksum import bits, different

OPS_PER_CALL = 32
"""Number of point-to-point operations per NCCL call; hundreds in one call deadlocked (Megatron-LM #7189)."""
LOCAL_BYTES = 64 << 20
"""Bytes that are copied within a rank in one call. A source that is computed, such as a merged weight, exists
until its call."""
CHECKSUM_ELEMENTS = 1 << 20
"""Number of elements per step of a checksum; each needs about 24 bytes of temporary memory."""


@dataclass
class BytesMoved:
    """Bytes moved by one rank in a refit."""

    received: int = 0
    sent: int = 0
    local: int = 0
    """Bytes copied from this rank's training parameters to its engine's."""
    fallback: int = 0
    """Bytes of whole tensors that were gathered because the engine's parameter cannot be written in place."""
    unabridged: int = 0
    """Bytes that this rank would have sent without `refit.changed_only`; 0 without it."""

    def __add__(self, other: "BytesMoved") -> "BytesMoved":
        return BytesMoved(*map(add, astuple(self), astuple(other)))


Exchange = Callable[[Mapping[int, Sequence[Tensor]], Mapping[int, Sequence[Tensor]]], None]
"""`exchange` within the group of a refit: outgoing and incoming tensors by rank."""


class MessageForm(Protocol):
    """Another form of the messages of one plan's refits, for example of `refit.changed_only`."""

    def exchange(
        self,
        number: int,
        batch: MessageBatch,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        held: Callable[[], None],
        exchange: Exchange,
    ) -> tuple[int, int]:
        """Exchange the messages of a batch; return the bytes sent and received, with headers.

        Collective over the ranks of the plan.

        number: the batch's index in the plan. outgoing: packed messages, uint8. incoming: buffers for the
        received messages; this method fills them. held: fills `incoming` with the elements that the engine
        holds now.
        """


@torch.no_grad()
def transfer(
    plan: RefitPlan,
    sources: Mapping[int, Tensor],
    destinations: Mapping[int, Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    changes: "MessageForm | None" = None,
) -> BytesMoved:
    """Execute the plan: write this rank's destinations. Collective over the group.

    sources, destinations: this rank's training and engine parameters, by the index of the weight; both have
    the same dtype. Allocates only `plan.peak_bytes` for messages, each rounded up to a multiple of 8 bytes.
    changes: another form of the messages, with only the elements that changed. It needs the same amount of
    memory a second time, and the destinations must still hold the values that the last call with this plan
    wrote.
    """
    done = BytesMoved()
    with tracing.span("refit within the rank", copies=len(plan.copies)):
        done.local = _copy_within(plan, sources, destinations)
    largest = max((_space(batch.sends + batch.receives) for batch in plan.batches), default=0)
    space = torch.empty(largest, dtype=torch.uint8, device=device)
    for number, batch in enumerate(plan.batches):
        buffers = _buffers(batch.sends + batch.receives, space)
        outgoing, incoming = buffers[: len(batch.sends)], buffers[len(batch.sends) :]
        with tracing.span("refit batch", sends=len(batch.sends), receives=len(batch.receives)):
            _pack(batch.sends, outgoing, sources)
            if changes is None:
                exchange(_by_peer(batch.sends, outgoing), _by_peer(batch.receives, incoming), group)
            else:
                held = partial(_pack, batch.receives, incoming, destinations)
                own = partial(exchange, group=group)
                sent, received = changes.exchange(number, batch, outgoing, incoming, held, own)
                done += BytesMoved(sent=sent, received=received)
            _copy(_unpacked(batch.receives, incoming, destinations))
    if changes is None:
        done.sent, done.received = plan.bytes_sent, plan.bytes_received
    else:
        done.unabridged = plan.bytes_sent
    return done


def exchange(
    outgoing: Mapping[int, Sequence[Tensor]],
    incoming: Mapping[int, Sequence[Tensor]],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send `outgoing` to its keys, the peers, and receive `incoming`. Collective over the group.

    Tensors must be contiguous; sender and receiver must agree on the sizes and on the order of the tensors
    between them. NCCL executes calls in order, so calls must not wait for each other in a cycle. Therefore
    every rank first handles the first tensor of each pair of ranks, then the second, and so on. Each time,
    all ranks iterate over the distances between ranks in the same order. The distance of a tensor is the same
    for its sender and its receiver.
    """
    rank, world_size = (
        (dist.get_rank(), dist.get_world_size()) if group is None else (group.rank(), group.size())
    )
    pending = []
    for turn in range(max(map(len, (*outgoing.values(), *incoming.values())), default=0)):
        for first in range(1, world_size, OPS_PER_CALL // 2):
            operations = []
            for distance in range(first, min(first + OPS_PER_CALL // 2, world_size)):
                to, source = (rank + distance) % world_size, (rank - distance) % world_size
                if turn < len(outgoing.get(to, ())):
                    operations.append(dist.P2POp(dist.isend, outgoing[to][turn], to, group))
                if turn < len(incoming.get(source, ())):
                    operations.append(dist.P2POp(dist.irecv, incoming[source][turn], source, group))
            if operations:
                pending += dist.batch_isend_irecv(operations)
    for work in pending:
        work.wait()


@torch.no_grad()
def compare(
    plan: RefitPlan,
    sources: Mapping[int, Tensor],
    destinations: Mapping[int, Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[tuple[int, int]]:
    """Return (weight's index, source rank) of every region on this rank that differs from its source.

    Collective over the group; each source sends 16 bytes per region.
    """
    copies = [_ends(copy, sources, destinations) for copy in plan.copies]
    wrong = [(plan.copies[number].weight, plan.rank) for number in different(copies)]
    return sorted({*wrong, *changed(sent_checksums(plan, sources, device, group), destinations)})


class Sums(NamedTuple):
    """Checksums of regions of the engine's parameters on this rank, by the ranks that sent them."""

    regions: list[tuple[int, Region]]
    """Source rank and region."""
    sums: Tensor
    """int64 [n, 2]."""


@torch.no_grad()
def sent_checksums(
    plan: RefitPlan,
    sources: Mapping[int, Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    every: int = 1,
    first: int = 0,
) -> Sums:
    """Return the checksums, computed by the senders, of the regions that this rank receives in the plan.

    every, first: only weights with index % every == first are included. Collective over the group; each
    source sends 16 bytes per region.
    """
    sent: dict[tuple, int] = {}
    outgoing: dict[int, list[int]] = {}
    for peer, region in _regions(plan, "sends"):
        if region.weight % every != first:
            continue
        # Several engine replicas receive the same region; its checksum is computed once.
        number = sent.setdefault((region.weight, region.local), len(sent))
        outgoing.setdefault(peer, []).append(number)
    expected: dict[int, list[Region]] = {}
    for peer, region in _regions(plan, "receives"):
        if region.weight % every == first:
            expected.setdefault(peer, []).append(region)
    sums = _checksums([sources[weight][index(local)] for weight, local in sent], device)
    incoming = {
        peer: torch.empty((len(regions), sums.shape[1]), dtype=torch.int64, device=device)
        for peer, regions in expected.items()
    }
    exchange(
        {peer: [sums[numbers]] for peer, numbers in outgoing.items()},
        {peer: [sums] for peer, sums in incoming.items()},
        group,
    )
    regions = [(peer, region) for peer, regions in expected.items() for region in regions]
    return Sums(regions, torch.cat([*incoming.values(), sums[:0]]))


@torch.no_grad()
def changed(sent: Sums, destinations: Mapping[int, Tensor]) -> list[tuple[int, int]]:
    """Return (weight's index, source rank) of every region with another checksum here than at its sender."""
    parts = [destinations[region.weight][index(region.local)] for _, region in sent.regions]
    differ = (_checksums(parts, sent.sums.device) != sent.sums).any(1).tolist()
    return [(region.weight, peer) for (peer, region), bad in zip(sent.regions, differ) if bad]


def _checksums(parts: list[Tensor], device: torch.device) -> Tensor:
    """Return the checksums of tensors, int64 [n, 2]."""
    return (
        torch.stack([checksum(part) for part in parts])
        if parts
        else torch.zeros((0, 2), dtype=torch.int64, device=device)
    )


def checksum(tensor: Tensor) -> Tensor:
    """Return two checksums of the tensor's bits, int64 [2], modulo 2**64.

    The first is the sum of the elements' bits as integers, the second the same sum weighted by position.

    The first changes if any single element changes, the second if any two different elements are exchanged.
    For example, the bits 1, 2 have the checksums 3 and 5, and the bits 2, 1 have 3 and 4.
    """
    rows = bits(tensor).flatten(0, -2) if tensor.ndim > 1 else bits(tensor)[:, None]
    width = rows.shape[1]
    step = max(1, CHECKSUM_ELEMENTS // width)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(rows), step):
        block = rows[first : first + step].reshape(-1).to(torch.int64)
        places = torch.arange(first * width + 1, first * width + 1 + len(block), device=tensor.device)
        total += torch.stack((block.sum(), (block * places).sum()))
    return total


def _ends(
    copy: Copy, sources: Mapping[int, Tensor], destinations: Mapping[int, Tensor]
) -> tuple[Tensor, Tensor]:
    source = sources[copy.weight][index(copy.source)]
    destination = destinations[copy.weight][index(copy.destination)]
    assert source.dtype == destination.dtype, (
        f"{copy.hf}: {source.dtype} in training, {destination.dtype} in the engine"
    )
    return source.reshape(destination.shape), destination


def _regions(plan: RefitPlan, direction: str) -> Iterator[tuple[int, Region]]:
    for batch in plan.batches:
        for message in batch.sends if direction == "sends" else batch.receives:
            for peer in message.peers:
                for region in message.regions:
                    yield peer, region


def _space(messages: tuple[Message, ...]) -> int:
    return sum(_aligned(message.num_bytes) for message in messages)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _buffers(messages: tuple[Message, ...], space: Tensor) -> list[Tensor]:
    """Return a slice of `space`, uint8, for each message."""
    buffers, at = [], 0
    for message in messages:
        buffers.append(space[at : at + message.num_bytes])
        at += _aligned(message.num_bytes)
    return buffers


def _by_peer(messages: tuple[Message, ...], buffers: list[Tensor]) -> dict[int, list[Tensor]]:
    out: dict[int, list[Tensor]] = {}
    for message, buffer in zip(messages, buffers):
        for peer in message.peers:
            out.setdefault(peer, []).append(buffer)
    return out


def _unpacked(
    messages: tuple[Message, ...], buffers: list[Tensor], parameters: Mapping[int, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (part of a parameter, the same elements in its message) of each region."""
    for message, buffer in zip(messages, buffers):
        at = 0
        for region in message.regions:
            view = parameters[region.weight][index(region.local)]
            yield view, buffer[at : at + view.nbytes].view(view.dtype).view(view.shape)
            at += view.nbytes
        assert at == message.num_bytes, f"a message of {at} bytes was planned with {message.num_bytes}"


def _pack(messages: tuple[Message, ...], buffers: list[Tensor], parameters: Mapping[int, Tensor]) -> None:
    """Fill the buffers of the messages with the elements of the parameters."""
    _copy((packed, view) for view, packed in _unpacked(messages, buffers, parameters))


def _copy_within(plan: RefitPlan, sources: Mapping[int, Tensor], destinations: Mapping[int, Tensor]) -> int:
    """Copy what stays on this rank, in calls of about LOCAL_BYTES, and return the number of bytes."""
    pairs, size, done = list[tuple[Tensor, Tensor]](), 0, 0
    for copy in plan.copies:
        source, destination = _ends(copy, sources, destinations)
        pairs.append((destination, source))
        size += source.nbytes
        if size >= LOCAL_BYTES:
            _copy(pairs)
            pairs, size, done = [], 0, done + size
    _copy(pairs)
    return done + size


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, all in one call."""
    targets, sources = [], []
    for target, source in pairs:
        targets.append(target)
        sources.append(source)
    if targets:
        torch._foreach_copy_(targets, sources)
