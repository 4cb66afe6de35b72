"""Messages that carry values of held columns (`rl.data.held`) from one rank to another.

Before a sample enters a batch, the held values of all its rows are collected on one rank. This is needed
because several replicas may have generated the sample's segments (carry-over), or ranks that do not train
(roles). A message contains the values of segments end to end; each segment's `Segment.row_key` precedes them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from rl.data.held import KEY, Absent, ColumnBytes
from rl.rollout.samples import Sample, Segment
from rl.runtime.collectives import exchange_bytes


def num_bytes(segment: Segment) -> int:
    """Return the size of a segment's values in a message; known on all ranks."""
    return KEY.itemsize + sum(values.nbytes for values in segment.held.values()) if segment.held else 0


def content_of(segment: Segment) -> bytes:
    """Return the values of a segment that this rank holds."""
    if not segment.held:
        return b""
    return KEY.type(segment.row_key).tobytes() + b"".join(v.tobytes() for v in segment.values.values())


def with_values(segment: Segment, content: bytes, holder: int) -> Segment:
    """Return the segment with the values of `content_of`, which rank `holder` has from now on.

    Raises RuntimeError if the values belong to another segment.
    """
    if not segment.held:
        return segment
    [key] = np.frombuffer(content, KEY, 1)
    if key != segment.row_key:
        raise RuntimeError(
            f"held columns: the values for {len(segment.token_ids)} tokens of turn {segment.turn} that came "
            f"from rank {segment.holder} are those of other tokens."
        )
    held: dict[str, np.ndarray | Absent] = {}
    first = KEY.itemsize
    for name, values in segment.held.items():
        flat = np.frombuffer(content, values.dtype, values.nbytes // values.dtype.itemsize, first)
        held[name] = flat.reshape(values.shape)
        first += values.nbytes
    return replace(segment, held=held, holder=holder)


def unpacked(samples: Sequence[Sample], content: bytes, holder: int) -> list[Sample]:
    """Return the samples with their values. content: all values end to end. See `with_values`."""
    first = 0

    def complete(segment: Segment) -> Segment:
        nonlocal first
        start, first = first, first + num_bytes(segment)
        return with_values(segment, content[start:first], holder)

    return [sample.with_segments(complete) for sample in samples]


def without_values(segment: Segment, holder: int) -> Segment:
    """Return the segment in the form for ranks that do not hold its values."""
    held: dict[str, np.ndarray | Absent] = {
        name: Absent(values.dtype, values.shape) for name, values in segment.held.items()
    }
    return replace(segment, held=held, holder=holder) if held else segment


def only_on(samples: Sequence[Sample], holder: int) -> list[Sample]:
    """Return the samples, which all ranks have, with held values on rank `holder` only. Not collective."""
    change = partial(replace if dist.get_rank() == holder else without_values, holder=holder)
    return [sample.with_segments(change) for sample in samples]


def collect(
    samples: Sequence[Sample], targets: Sequence[int], device: torch.device
) -> tuple[list[Sample], ColumnBytes]:
    """Collect each sample's held values on one rank; return the samples and the bytes that this rank moved.

    Collective over the world.

    targets: the rank that collects the values, per sample. Values that this rank already has are not sent.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = np.zeros((world, world), np.int64)  # from, to
    outgoing = defaultdict[int, list[bytes]](list)
    for sample, target in zip(samples, targets):
        for segment in sample.segments:
            source = max(segment.holder, 0)
            if source != target:
                sizes[source, target] += num_bytes(segment)
                if source == rank:
                    outgoing[target].append(content_of(segment))
    if not sizes.any():
        return list(samples), ColumnBytes()
    found = exchange_bytes({target: b"".join(parts) for target, parts in outgoing.items()}, sizes, device)
    moved = ColumnBytes(sum(map(len, found.values())), int(sizes[:, rank].sum())).checked("a collection")
    starts = defaultdict[int, int](int)

    def collected(segment: Segment, target: int) -> Segment:
        source = max(segment.holder, 0)
        if source == target or not segment.held:
            return segment
        if target != rank:
            return without_values(segment, target)
        start = starts[source]
        starts[source] += num_bytes(segment)
        return with_values(segment, found[source][start : starts[source]], target)

    pairs = zip(samples, targets)
    return [sample.with_segments(partial(collected, target=target)) for sample, target in pairs], moved
