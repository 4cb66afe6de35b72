"""Idle shares of replicas, measured and for a greedy assignment by length."""

import pytest

from rl.rollout.queue import greedy_idle, idle_shares


def test_idle_shares_are_relative_to_the_busiest_replica():
    assert idle_shares([4.0, 2.0, 3.0]) == (0.25, 0.5)
    assert idle_shares([0.0, 0.0]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("loads", "replicas", "share"),
    [
        ([1, 9, 5, 5], 2, 0.0),  # 9 + 1 and 5 + 5
        ([3, 3, 2, 2, 2], 2, 1 - 6 / 7),  # greedy: 3 + 2 + 2 and 3 + 2; optimal: 6 and 6
        ([10, 1, 1], 2, 1 - 6 / 10),
        ([5], 4, 0.75),
        ([0, 0], 2, 0.0),
    ],
)
def test_greedy_assigns_the_largest_load_first(loads, replicas, share):
    assert greedy_idle(loads, replicas) == pytest.approx(share, abs=1e-12)
