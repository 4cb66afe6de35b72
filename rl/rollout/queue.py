"""Work queues: which replica generates which prompt.

Items are 0..n-1. Only the leader of a replica draws.
"""

import heapq
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist


class Queue(Protocol):
    """The work of one call of the engine."""

    def draw(self) -> int | None:
        """Return the next item for this replica, or None if none is left."""


class StaticQueue:
    """Gives items r, r + R, r + 2R, ... to replica r of R. Deterministic, without communication."""

    def __init__(self, num_items: int, *, replica: int, num_replicas: int):
        self._items = iter(range(replica, num_items, num_replicas))

    def draw(self) -> int | None:
        return next(self._items, None)


class SharedQueue:
    """Gives the next item to the replica that asks first, by a counter in the job's TCPStore."""

    def __init__(self, num_items: int, *, name: str):
        self._num_items, self._name = num_items, name
        self._store = dist.distributed_c10d._get_default_store()

    def draw(self) -> int | None:
        item = self._store.add(self._name, 1) - 1
        return item if item < self._num_items else None


def greedy_idle(loads: list[int], num_replicas: int) -> float:
    """Return the mean idle share of replicas that take the largest remaining load when they become free.

    The order needs response lengths that are known only afterwards, so this is a reference value for a queue.
    The busiest replica is within 4/3 - 1/(3R) of the optimum for R replicas (Graham 1969).

    loads: number of response tokens of each prompt's samples.
    """
    busy = [0] * num_replicas
    for load in sorted(loads, reverse=True):
        heapq.heapreplace(busy, busy[0] + load)
    return idle_shares(busy)[0]


def idle_shares(busy: Sequence[float]) -> tuple[float, float]:
    """Return mean and maximum over replicas of 1 - (busy time of the replica) / (that of the busiest)."""
    longest = max(busy)
    if longest <= 0:
        return 0.0, 0.0
    return 1 - sum(busy) / len(busy) / longest, 1 - min(busy) / longest
