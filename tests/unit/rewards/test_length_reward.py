import numpy as np
import pytest

from rl.rewards.length import overlong_penalties

DAPO = {"max_tokens": 20480, "buffer_tokens": 4096, "penalty": 1.0}


def test_equation_13_of_dapo():
    lengths = np.array([[0, 16384, 16385, 17408], [18432, 20480, 20481, 10**9]])
    penalties = overlong_penalties(lengths, **DAPO)
    assert penalties.tolist() == [[0.0, 0.0, -1 / 4096, -0.25], [-0.5, -1.0, -1.0, -1.0]]
    assert penalties.dtype == np.float64


def test_the_penalty_is_scaled_and_never_minus_zero():
    assert overlong_penalties(18, max_tokens=20, buffer_tokens=4, penalty=3.0) == -1.5
    assert str(overlong_penalties(1, max_tokens=20, buffer_tokens=4, penalty=3.0)) == "0.0"
    assert overlong_penalties(20, max_tokens=20, buffer_tokens=20, penalty=0.0) == 0.0


@pytest.mark.parametrize(
    "wrong", [{"buffer_tokens": 0}, {"buffer_tokens": 20481}, {"buffer_tokens": -1}, {"penalty": -1.0}]
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="overlong penalty"):
        overlong_penalties(np.ones(1), **{**DAPO, **wrong})
