"""Exchange of samples. Every rank receives all samples, about 12 bytes per token."""

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from rl.rollout.samples import Sample, pack, unpack
from rl.runtime.collectives import gather_bytes
from rl.runtime.device import Device
from rl.runtime.plain_data import decode, encode


def exchange(own: Sequence[Sample], device: Device, *, conversations: bool = False) -> list[Sample]:
    """Return the samples of all ranks, in the order of the ranks. Collective over the world.

    Values of held columns stay on the rank that generated them; all ranks learn their sizes. conversations:
    whether the conversations of trajectories are exchanged, too.
    """
    packed = pack(own, held=False, conversations=conversations)
    samples: list[Sample] = []
    for rank, content in enumerate(gather_bytes(encode(packed), device.torch)):
        found = unpack(decode(content), rank=rank)
        if packed["held"] and rank == dist.get_rank():
            found = [_with_held(sample, original) for sample, original in zip(found, own, strict=True)]
        samples += found
    return samples


def _with_held(sample: Sample, original: Sample) -> Sample:
    """Return the sample with the values of held columns of the original."""
    pairs = zip(sample.segments, original.segments, strict=True)
    return replace(sample, segments=tuple(replace(copy, held=own.held) for copy, own in pairs))
