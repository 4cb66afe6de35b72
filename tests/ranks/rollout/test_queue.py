import json

import pytest

from rl.rollout.queue import assign_all, assign_held, static_queue
from tests.spawn import run_ranks

# Two ranks, each the leader of a replica.
PROGRAM = """
    import json
    import torch.distributed as dist

    from rl.rollout.queue import shared_queue
    from rl.runtime.ranks import discover
    from rl.runtime.session import job, session

    def draw_all():
        store, rank, drawn = job().store.clone(), dist.get_rank(), {}

        drawn["race"] = list(shared_queue(40, name="race"))

        # Rank 1 works on its first item until rank 0 has nothing left to draw.
        queue = shared_queue(10, name="slow")
        if rank == 1:
            drawn["slow"] = [next(queue)]
            store.set("slow rank is busy", "")
            assert store.wait(["fast rank is done"], 60)
            drawn["slow"] += list(queue)
        else:
            assert store.wait(["slow rank is busy"], 60)
            drawn["slow"] = list(queue)
            store.set("fast rank is done", "")

        drawn["nothing"] = list(shared_queue(0, name="nothing"))

        # Two queues at the same time do not share a counter.
        one, other = (shared_queue(3, name=f"{name} {rank}") for name in ("one", "other"))
        drawn["alternating"] = [next(one), next(other), next(one), next(other)]
        return drawn

    with session(discover()):
        print(json.dumps(draw_all()))
        dist.barrier()
"""


@pytest.fixture(scope="module")
def drawn():
    """Return the draws of each of two ranks, by case."""
    return [json.loads(out) for out in run_ranks(2, PROGRAM)]


# Static --------------------------------------------------


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("num_items", [0, 1, 7, 24])
def test_static_replicas_cover_all_items_once(num_items, num_replicas):
    shares = [
        list(static_queue(num_items, replica=r, num_replicas=num_replicas)) for r in range(num_replicas)
    ]
    assert sorted(item for share in shares for item in share) == list(range(num_items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_static_replicas_take_turns():
    assert list(static_queue(8, replica=1, num_replicas=3)) == [1, 4, 7]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_held_items_go_to_their_holders_in_static_shares(num_replicas):
    assert assign_all([-1] * 7, num_replicas) == [
        list(range(r, 7, num_replicas)) for r in range(num_replicas)
    ]
    shares = assign_all([1, 1, -1, 1, 5, 0, 1], num_replicas)
    assert sorted(item for share in shares for item in share) == list(range(7))
    assert [len(share) for share in shares] == [len(range(r, 7, num_replicas)) for r in range(num_replicas)]
    if num_replicas == 2:
        assert shares[1] == [0, 1, 3]  # its share is full: the fourth one goes to the other replica
        assert assign_held([1, 1, -1, 1, 5, 0, 1], 2) == ([[5], [0, 1, 3]], [2, 4, 6])


# Shared --------------------------------------------------


def test_shared_replicas_cover_all_items_once_each_in_ascending_order(drawn):
    shares = [rank["race"] for rank in drawn]
    assert sorted(shares[0] + shares[1]) == list(range(40))
    assert all(share == sorted(share) for share in shares)


def test_a_slow_replica_draws_fewer(drawn):
    fast, slow = (rank["slow"] for rank in drawn)
    assert slow == [0]
    assert fast == list(range(1, 10))


def test_an_empty_shared_queue_gives_nothing(drawn):
    assert [rank["nothing"] for rank in drawn] == [[], []]


def test_queues_of_different_names_count_apart(drawn):
    assert [rank["alternating"] for rank in drawn] == [[0, 0, 1, 1]] * 2
