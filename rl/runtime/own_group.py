"""A process group between ranks that have different default groups, such as the roles of a split job."""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from rl.runtime.device import Device


def own_group(
    store: dist.Store, name: str, *, rank: int, size: int, timeout: datetime.timedelta, device: Device | None
) -> dist.ProcessGroup:
    """Return a connected group of `size` processes that share the store. Collective over them.

    torch.distributed.new_group makes only parts of the default group. The group of this function can be used
    in the same way: it may be passed to torch.distributed's functions, and lasts until
    destroy_process_group(). Its ranks are numbered from 0, independently of the default group.

    Args:
        name: a name that was not used before in this store and process.
        device: NCCL on this device if it is CUDA; None means gloo.
    """
    cuda = device.torch if device is not None and device.is_cuda else None
    # Another thread may be waiting on the given connection.
    own = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack the method
    backend = "nccl" if cuda else "gloo"
    helper: Any = _new_process_group_helper  # private; torch versions differ in the type of the name
    group, _ = helper(size, rank, [], backend, own, group_name=name, timeout=timeout)
    _world.pg_group_ranks[group] = {number: number for number in range(size)}
    # NCCL connects in the first collective, which needs all ranks.
    dist.all_reduce(torch.zeros(1, device=cuda or "cpu"), group=group)
    return group
