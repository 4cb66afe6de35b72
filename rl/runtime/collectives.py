"""Collectives that several rooms use. Each is collective over its group, by default the world.

The collectives of each group:

- world: exchange of samples, scores, results of forward passes, metrics, weights of a refit (point to point);
- control (the world on gloo): the comparison before each phase, stop decisions, checkpoints, errors;
- tp, ep: inside the layers and the head; pp: activations between stages; dp: gradients and weights;
- replica (the ranks of one vLLM engine): records of events, vLLM's own tensor parallelism.

docs/architecture.md lists the collectives of one step, with sizes.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from rl.runtime.plain_data import decode, encode

T = TypeVar("T")

BUFFER = 64 << 20
"""Bytes that a rank sends, and receives, at once in `exchange_bytes`."""


def gather_objects(
    value: T, group: dist.ProcessGroup | None = None, *, types: Sequence[type] = ()
) -> list[T]:
    """Return every rank's `value`, in the order of the group's ranks.

    Values are plain data (`rl.runtime.plain_data`). types: dataclasses and NamedTuples that they may contain.
    """
    where, world = _get_object_coll_device(group), dist.get_world_size(group)
    mine = _as_tensor(encode(value, *types), where)
    sizes = torch.empty(world, dtype=torch.int64, device=where)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(mine)], device=where), group=group)
    longest = int(sizes.max())
    contents = [torch.empty(longest, dtype=torch.uint8, device=where) for _ in range(world)]
    dist.all_gather(contents, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=group)
    return [
        decode(content[:size].cpu().numpy().tobytes(), *types)
        for content, size in zip(contents, sizes.tolist())
    ]


def is_same_on_all_ranks(text: str) -> bool:
    """Return whether a text is identical on all ranks, by an all-reduce of 16 bytes. Collective over the
    world."""
    extremes = torch.tensor([hash63(text), -hash63(text)])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return bool(extremes[0] == -extremes[1])


def hash63(text: str) -> int:
    """Return 63 bits of a hash of the text, which fit into an int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def gather_texts(own: Iterable[str]) -> list[str]:
    """Return the texts of all ranks, each once, in the order of the ranks."""
    return list(dict.fromkeys(text for texts in gather_objects(list(own)) for text in texts))


def broadcast_object(
    value: T, source: int = 0, group: dist.ProcessGroup | None = None, *, types: Sequence[type] = ()
) -> T:
    """Return the `value` of the group's rank `source` on every rank; what other ranks pass is ignored.

    The value is plain data, as in `gather_objects`.
    """
    where, sends = _get_object_coll_device(group), dist.get_rank(group) == source
    content = _as_tensor(encode(value, *types), where) if sends else None
    size = torch.tensor([0 if content is None else len(content)], device=where)
    dist.broadcast(size, group=group, group_src=source)
    if content is None:
        content = torch.empty(int(size), dtype=torch.uint8, device=where)
    dist.broadcast(content, group=group, group_src=source)
    return value if sends else decode(content.cpu().numpy().tobytes(), *types)


def _as_tensor(content: bytes, device: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def sum_over_world(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the sum of a CPU tensor over the world, on the CPU; exact where all ranks except one pass 0."""
    moved = values.to(device, copy=True)
    dist.all_reduce(moved)
    return moved.cpu()


def gather_bytes(content: bytes, device: torch.device) -> list[bytes]:
    """Return every rank's bytes, in the order of the ranks. Collective over the world.

    Ranks with nothing to send cost nothing: each byte is written by one rank and is 0 on the others. For
    example, ranks with 3, 0 and 2 bytes sum a tensor of 5 bytes.
    """
    rank, sizes = dist.get_rank(), torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[rank] = len(content)
    sizes = sum_over_world(sizes, device)
    everything = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
    if content:
        own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        everything.split(sizes.tolist())[rank].copy_(own)
    everything = sum_over_world(everything, device)
    return [part.numpy().tobytes() for part in everything.split(sizes.tolist())]


def exchange_bytes(messages: dict[int, bytes], sizes: np.ndarray, device: torch.device) -> dict[int, bytes]:
    """Return the received messages, by the rank that sent them. Collective over the world.

    messages: by receiver, for example {2: b"abc"}. sizes: bytes by sender and receiver, int64 [world, world].
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    outgoing = [messages.get(target, b"") for target in range(world)]
    assert [len(content) for content in outgoing] == sizes[rank].tolist(), "messages differ from their sizes"
    incoming = [bytearray() for _ in range(world)]
    chunk = max(1, BUFFER // world)
    for start in range(0, int(sizes.max()), chunk):
        left = (sizes - start).clip(0, chunk)
        sending, receiving = left[rank].tolist(), left[:, rank].tolist()
        piece = bytearray().join(content[start : start + chunk] for content in outgoing)
        sent = torch.frombuffer(piece, dtype=torch.uint8) if piece else torch.empty(0, dtype=torch.uint8)
        received = torch.empty(sum(receiving), dtype=torch.uint8, device=device)
        dist.all_to_all_single(received, sent.to(device), receiving, sending)
        for content, part in zip(incoming, received.cpu().split(receiving)):
            content += part.numpy().tobytes()
    return {source: bytes(content) for source, content in enumerate(incoming) if content}


def any_rank(here: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `here` is true on any rank of the group."""
    anywhere = torch.tensor(int(here))
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
    return bool(anywhere)
