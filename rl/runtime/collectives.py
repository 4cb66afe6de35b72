"""Collectives that several rooms use. Each is collective over its group, by default the world.

Which collective runs in which group:
- world: exchange of samples, scores, results of forward passes, metrics, weights of a refit (point to point);
- control (the world on gloo): the comparison before each phase, stop decisions, checkpoints, errors;
- tp, ep: inside the layers and the head; pp: activations between stages; dp: gradients and weights;
- replica (the ranks of one vLLM engine): records of events, vLLM's own tensor parallelism.
docs/architecture.md has the table of one step, with sizes and the calling functions.
"""

from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's `value`, in the order of the group's ranks. Values are pickled."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: T, source: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return the `value` of the group's rank `source` on every rank; what other ranks pass is ignored."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


def sum_over_world(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the sum of a CPU tensor over the world, on the CPU; exact where all ranks but one pass 0."""
    moved = values.to(device, copy=True)
    dist.all_reduce(moved)
    return moved.cpu()


def any_rank(here: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `here` is true on any rank of the group."""
    anywhere = torch.tensor(int(here))
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
    return bool(anywhere)
