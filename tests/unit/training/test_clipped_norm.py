"""The norm of clipped gradients is checked against the norm before clipping and the limit."""

import pytest

from rl.training.gradients import WrongReduction, check_clipped


@pytest.mark.parametrize("norm, limit", [(33.8, 1.0), (0.5, 1.0), (0.5, 0.0), (1e-5, 1e-6), (33.8, 1e-20)])
def test_megatrons_clipping_is_right_for_any_limit(norm, limit):
    clipped = norm * min(1.0, limit / (norm + 1e-6)) if limit else norm
    check_clipped([(clipped * (0.995 if limit == 1e-20 else 1.0)) ** 2, norm, 0.0], limit)


def test_the_norm_of_a_part_is_named():
    with pytest.raises(WrongReduction, match="rank 1 found a gradient norm of 2, .* norm 2, but it has 1"):
        check_clipped([1.0, 1.0, 2.0, 0.0, 0.0], 0.0)
