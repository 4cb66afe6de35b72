"""Collectives that belong to no engine."""

from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def sum_over_world(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Sum of a CPU tensor over all ranks, back on the CPU. Where only one rank has a value and the others 0 the result
    is exact. Collective over the world."""
    moved = values.to(device, copy=True)
    dist.all_reduce(moved)
    return moved.cpu()


def from_first_rank(text: str) -> str:
    """Return rank 0's text on every rank. Collective over the world."""
    texts = [text]
    dist.broadcast_object_list(texts, src=0)
    return texts[0]


def any_rank(here: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether it is true on any rank. Collective over `group`, the world by default."""
    anywhere = torch.tensor(int(here))
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
    return bool(anywhere)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order. Collective over `group`, the world by default."""
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone
