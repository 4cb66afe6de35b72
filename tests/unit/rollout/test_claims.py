"""Owners of groups, and replicas that a run goes on without."""

from rl.features.roles.claims import Claims
from rl.runtime.excluded_replicas import ExcludedReplicas
from rl.runtime.job_store import own_store


def make(minimum: int = 1, num_replicas: int = 3):
    """Return the excluded replicas, of two ranks each after one trainer, and the claims of each replica."""
    store = own_store()
    excluded = ExcludedReplicas(
        store, [range(1 + 2 * n, 3 + 2 * n) for n in range(num_replicas)], minimum=minimum
    )
    assert excluded.exclude([1]) == []  # the collectives of the start-up need all ranks
    excluded.release()
    return excluded, [Claims(store, excluded, replica) for replica in range(num_replicas)]


def search(claims: Claims, items: range) -> int | None:
    claims._next_search = 0.0
    return claims.abandoned(items)


def test_abandoned_items_are_taken_over_once():
    excluded, (first, second, third) = make()
    assert [next(claims) for claims in (first, second, second, first, third)] == [0, 1, 2, 3, 4]
    first.note_done(1)
    second._store.add("next", 1)  # item 5: the replica dies before it has claimed it
    assert search(first, range(9)) is None
    assert excluded.exclude([4]) == [1]
    found = [search(claims, range(9)) for claims in (first, third, first, third)]
    assert found == [2, 5, None, None] and next(first) == 6
    assert excluded.exclude([5, 6]) == [2]
    assert [search(first, range(4, 6)) for _ in range(3)] == [4, 5, None]


def test_a_draw_skips_an_item_that_was_taken_over():
    excluded, (first, second, _) = make()
    second._store.add("next", 1)
    excluded.exclude([3])
    assert search(first, range(3)) == 0
    second._store.set("next", "0")  # the replica lives after all, and claims the item of its number
    assert next(second) == 1


def test_replicas_are_excluded_only_if_enough_live():
    excluded, _ = make(minimum=2)
    assert excluded.exclude([0, 3]) == []  # a trainer
    assert excluded.exclude([3, 5]) == []  # two of three replicas
    assert excluded.hold(lambda excluded: False) is None
    assert excluded.exclude([4]) == [1] and excluded.excluded_ranks() == {3, 4}
    assert excluded.exclude([1]) == []
    excluded, _ = make()
    assert excluded.hold(lambda excluded: True) == ()  # weights are being sent
    assert excluded.exclude([2]) == []
    excluded.release()
    assert excluded.exclude([2]) == [0] and excluded.ranks(excluded.numbers()) == (3, 4, 5, 6)
