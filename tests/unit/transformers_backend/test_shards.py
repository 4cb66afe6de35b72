"""The comparison of gradients before and after the ranks of a copy have added them up."""

import pytest

import rl.training  # noqa: F401  (before megatron.core)
from rl.features.transformers_backend.shards import check_sums
from rl.training.gradients import WrongReduction


def test_a_lost_gradient_ends_the_run():
    check_sums(100.0, 100.0 + 1e-5, 300.0, num_ranks=2)
    with pytest.raises(WrongReduction, match="2 ranks of a copy"):
        check_sums(100.0, 99.9, 300.0, num_ranks=2)
    with pytest.raises(WrongReduction):
        check_sums(float("nan"), 0.0, 1.0, num_ranks=2)
