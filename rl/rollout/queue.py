"""Work queues: which replica generates which prompt.

A queue is an iterator over items 0..n-1. Only the leader of a replica draws from it.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rl.runtime.session import job


def static_queue(num_items: int, *, replica: int, num_replicas: int) -> Iterator[int]:
    """Return items r, r + R, r + 2R, ... for replica r of R. Deterministic, without communication."""
    return iter(range(replica, num_items, num_replicas))


def shared_queue(num_items: int, *, name: str) -> Iterator[int]:
    """Yield the next item to the replica that asks first, by a counter in the job's store."""
    add = shared_counter(name)
    while (item := add(1) - 1) < num_items:
        yield item


def assign_held(holders: Sequence[int], num_replicas: int) -> tuple[list[list[int]], list[int]]:
    """Return (items that each replica takes first because it holds them, the remaining items in order).

    A replica takes at most its static share. For example, with 2 replicas and the holders [0, 0, 0, -1],
    replica 0 takes items 0 and 1 first, and the remaining items are 2 and 3.

    holders: the replica that holds each item; -1: no replica holds the item.
    """
    own: list[list[int]] = [[] for _ in range(num_replicas)]
    others: list[int] = []
    for item, holder in enumerate(holders):
        share = range(holder, len(holders), num_replicas) if 0 <= holder < num_replicas else range(0)
        (own[holder] if share and len(own[holder]) < len(share) else others).append(item)
    return own, others


def assign_all(holders: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Return the items of each replica: first items that it holds, then others up to its static share."""
    own, others = assign_held(holders, num_replicas)
    for place, item in enumerate(others):
        in_turn = ((place + shift) % num_replicas for shift in range(num_replicas))
        own[next(r for r in in_turn if len(own[r]) < len(range(r, len(holders), num_replicas)))].append(item)
    return own


class PastLengths:
    """Mean response length of each prompt when it was last sampled, used as the next expected length."""

    def __init__(self) -> None:
        self.means: dict[int, float] = {}
        """Index of the prompt -> tokens."""

    def note(self, indices: Sequence[int], groups: Sequence[int], lengths: Sequence[int]) -> None:
        """Note the lengths of samples. groups: place of each sample's prompt in `indices`."""
        own: dict[int, list[int]] = defaultdict(list)
        for group, length in zip(groups, lengths):
            own[group].append(length)
        for group, index in enumerate(indices):
            self.means[index] = sum(own[group]) / len(own[group])

    def longest_first(self, indices: Sequence[int]) -> list[int]:
        """Return the places of the prompts, the longest expected first.

        Prompts without a past are expected to have the others' mean length. For example, with the past
        lengths 40, none and 80 the order is [2, 1, 0].
        """
        usual = sum(self.means.values()) / max(1, len(self.means))
        return sorted(range(len(indices)), key=lambda place: -self.means.get(indices[place], usual))


def shared_counter(name: str) -> Callable[[int], int]:
    """Return a function that adds to the counter `name` of the job's store and returns its value."""
    return partial(job().store.add, name)


def own_counter() -> Callable[[int], int]:
    """Return a function that adds to a counter of this process and returns its value."""
    value = 0

    def add(amount: int) -> int:
        nonlocal value
        value += amount
        return value

    return add


def greedy_idle(loads: list[int], num_replicas: int) -> float:
    """Return the mean idle share of replicas that take the largest remaining load when they become free.

    This assignment needs response lengths that are known only afterwards, so it only serves as a reference
    value for a queue. With R replicas, the busiest replica takes at most 4/3 - 1/(3R) times the optimum
    (Graham 1969).

    loads: number of response tokens of each prompt's samples.
    """
    busy = [0] * num_replicas
    for load in sorted(loads, reverse=True):
        heapq.heapreplace(busy, busy[0] + load)
    return idle_shares(busy)[0]


def idle_shares(busy: Sequence[float]) -> tuple[float, float]:
    """Return mean and maximum over replicas of 1 - (busy time) / (busy time of the busiest replica)."""
    longest = max(busy)
    if longest <= 0:
        return 0.0, 0.0
    return 1 - sum(busy) / len(busy) / longest, 1 - min(busy) / longest
