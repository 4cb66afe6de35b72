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


def any_rank(here: bool) -> bool:
    """Whether it is true on some rank. Collective over the world."""
    anywhere = torch.tensor(int(here))
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    return bool(anywhere)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order. Collective over `group`, the world by default."""
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone
