"""Which replica generates which prompt. Items are numbers 0..n-1; every rank of a replica sees the same draws."""

from typing import Protocol

import torch
import torch.distributed as dist


class Queue(Protocol):
    def draw(self) -> int | None:
        """The next item for this replica, or None when there is none left. Called at the same point of the schedule by
        every rank of the replica."""


class StaticQueue:
    """Replica r of R takes items r, r + R, r + 2R, ...: repeatable, and no communication."""

    def __init__(self, num_items: int, *, replica: int, num_replicas: int):
        self._items = iter(range(replica, num_items, num_replicas))

    def draw(self) -> int | None:
        return next(self._items, None)


class SharedQueue:
    """A counter in the job's TCPStore: whoever is free takes the next item, so a replica with short responses takes more.

    The replica's first rank draws and broadcasts within the replica's (gloo) group.
    """

    def __init__(self, num_items: int, *, name: str, replica_group):
        self._num_items, self._name, self._group = num_items, name, replica_group
        self._store = dist.distributed_c10d._get_default_store()

    def draw(self) -> int | None:
        item = torch.zeros(1, dtype=torch.int64)
        if self._group.rank() == 0:
            item[0] = self._store.add(self._name, 1) - 1
        if self._group.size() > 1:
            dist.broadcast(item, group=self._group, group_src=0)
        return int(item) if item < self._num_items else None
