"""A process group between ranks that have different default groups, such as the roles of a split job."""

import datetime

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from rl.runtime.device import Device


def own_group(
    store: dist.Store, name: str, *, rank: int, size: int, timeout: datetime.timedelta, device: Device | None
) -> dist.ProcessGroup:
    """Return a connected group of `size` processes that share the store. Collective over them.

    torch.distributed.new_group makes only parts of the default group. As its result, this group may be passed
    to torch.distributed's functions; ranks are those of the group. It lasts until destroy_process_group().

    Args:
        name: of the group, not used before in this store.
        device: NCCL on this device if it is CUDA; None means gloo.
    """
    store = dist.PrefixStore(name, store.clone())  # another thread may be waiting on the given connection
    group = dist.ProcessGroup(store, rank, size)
    if device is not None and device.is_cuda:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        backend, kind = dist.ProcessGroupGloo(store, rank, size, timeout), dist.ProcessGroup.BackendType.GLOO
    where = device.torch if device is not None and device.is_cuda else torch.device("cpu")
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device(where.type), kind, backend)
    group._set_group_name(name)
    _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    dist.all_reduce(torch.zeros(1, device=where), group=group)  # NCCL connects in the first collective
    return group
