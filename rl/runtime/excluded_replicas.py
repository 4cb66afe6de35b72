"""The replicas of the generators that have died and are left out of the run (`roles.min_replicas`).

The list is in the job's store. Rank 0 alone extends it, when its watchdog finds a lost rank; every other rank
reads it. A replica that is left out stays out until the next start, and its living ranks end themselves. For
example, with three replicas and min_replicas=2 the run survives the death of one replica.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence

from rl.runtime.job_store import JobStore, StoreError

POLL_S = 0.1
"""Time between two looks for the other ranks at the end of a run, in seconds."""


class ExcludedReplicas:
    """The replicas of the generators. No method is collective, except `meet`.

    Args:
        store: the job's store; this object opens a connection of its own.
        replicas: the job's ranks of each replica.
        minimum: number of replicas that must live.
    """

    def __init__(self, store: JobStore, replicas: Sequence[range], *, minimum: int):
        self._store = store.clone("excluded")
        self.replicas, self.minimum = replicas, minimum
        self._lock = threading.Lock()
        self._is_held = True
        """Whether no replica can be left out, because ranks wait for all other ranks. This is so in start-up,
        until `hold` is first called, and while weights are sent."""

    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of the replicas that are left out, in the order of their deaths."""
        return tuple(json.loads(self._store.get("list") or "[]"))

    def excluded_ranks(self) -> set[int]:
        return {rank for replica in self.numbers() for rank in self.replicas[replica]}

    def ranks(self, excluded: Collection[int]) -> tuple[int, ...]:
        """Return the job's ranks of all replicas but these."""
        return tuple(rank for n, own in enumerate(self.replicas) if n not in excluded for rank in own)

    def replica_of(self, rank: int) -> int | None:
        """Return the replica of a rank; None for a trainer."""
        return next((number for number, own in enumerate(self.replicas) if rank in own), None)

    def are_one_replica(self, rank: int, others: Collection[int]) -> bool:
        """Return whether `rank` and any of `others` belong to the same replica."""
        return any(rank in own and any(other in own for other in others) for own in self.replicas)

    # On rank 0 ----------------------------------------------------------------------------------------------

    def exclude(self, lost: Collection[int]) -> list[int]:
        """Leave out the replicas of these ranks and return their numbers.

        Returns [] and changes nothing if a trainer is among the ranks, if too few replicas would live, in
        start-up, or while weights are sent: communicators then wait for the lost rank.
        """
        numbers = {self.replica_of(rank) for rank in lost}
        with self._lock:
            before = self.numbers()
            found = sorted(number for number in numbers if number is not None and number not in before)
            if self._is_held or None in numbers:
                return []
            if len(self.replicas) - len(before) - len(found) < self.minimum:
                return []
            self._store.set("list", json.dumps([*before, *found]))
        return found

    def hold(self, is_ready: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...] | None:
        """Return the excluded replicas if is_ready(excluded), else None.

        If it is ready, no other replica is excluded until `release`.
        """
        with self._lock:
            excluded = self.numbers()
            self._is_held = is_ready(excluded)
            return excluded if self._is_held else None

    def release(self) -> None:
        with self._lock:
            self._is_held = False

    # The end ------------------------------------------------------------------------------------------------

    def meet(self, rank: int, world_size: int) -> bool:
        """Wait until all ranks that live have called; return whether all ranks of the job have.

        A barrier of a process group is not used, because it needs all ranks. Collective over the ranks that
        live.
        """
        self._store.set(f"arrived {rank}", "")
        if rank == 0:
            while not self._have_arrived(gone := self.excluded_ranks(), world_size):
                time.sleep(POLL_S)
            self._store.set("met", "" if gone else "all")
            return not gone
        try:
            while not self._store.check(["met"]):
                time.sleep(POLL_S)
            return self._store.get("met") == b"all"
        except StoreError:  # rank 0, which held the store, has gone on
            return False

    def _have_arrived(self, gone: set[int], world_size: int) -> bool:
        return self._store.check([f"arrived {rank}" for rank in range(world_size) if rank not in gone])
