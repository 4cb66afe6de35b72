"""Records which replica owns each group, so that the groups of a dead replica are generated again.

An item is a group, numbered from 0 for the first group of this start of the job. As in `shared_queue`, a
counter in the job's store gives the next item to the replica that asks first. In addition, the store has a
key for each item; the key's value is the owner of the item. A replica changes the owner only by
compare-and-set, so only one replica can take over an item. For example, if replica 2 dies with item 7,
replicas 0 and 1 both try to replace owner 2 of item 7, and one of them succeeds.
"""

import time
from collections.abc import Iterator

from rl.runtime.excluded_replicas import ExcludedReplicas
from rl.runtime.job_store import JobStore

SEARCH_S = 5.0
"""Time between two searches for abandoned items, in seconds."""
_DONE = "done"


class Claims(Iterator[int]):
    """The queue of the items of all replicas, which has no end. Only leaders and the first trainer call it.

    Args:
        store: the job's store; this object opens a connection of its own.
        replica: number of this rank's replica; None for a trainer.
    """

    def __init__(self, store: JobStore, excluded: ExcludedReplicas, replica: int | None = None):
        self._store = store.clone("claims")
        self._excluded, self._own = excluded, str(replica)
        self._claimed: set[int] = set()
        self._next_search = 0.0

    def __next__(self) -> int:
        """Return the next item without an owner."""
        while not self._claim(item := self._store.add("next", 1) - 1, ""):
            pass
        return item

    def abandoned(self, items: range) -> int | None:
        """Claim one of these items that an excluded replica owned, and return it; None if there is none.

        Searches at most every SEARCH_S seconds while it finds nothing; between two searches it returns None.
        """
        now = time.monotonic()
        if now < self._next_search:
            return None
        excluded = {str(replica) for replica in self._excluded.numbers()}
        self._claimed = {item for item in self._claimed if item >= items.start}
        if excluded:
            for item in range(items.start, min(items.stop, self._store.add("next", 0))):
                # A replica may have died after it advanced the counter and before it claimed the item. The
                # item then has the owner "".
                if item not in self._claimed and any(self._claim(item, owner) for owner in ("", *excluded)):
                    return item
        self._next_search = now + SEARCH_S
        return None

    def _claim(self, item: int, owner: str) -> bool:
        if self._store.compare_set(str(item), owner, self._own) != self._own.encode():
            return False
        self._claimed.add(item)
        return True

    def note_done(self, item: int) -> None:
        """Note that the trainers have the samples of an item, so that no replica generates it again."""
        self._store.set(str(item), _DONE)

    def forget(self, items: range) -> None:
        """Remove the keys of items that the policy has learned from."""
        for item in items:
            self._store.delete(str(item))
