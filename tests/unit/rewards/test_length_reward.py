import numpy as np
import pytest

from rl.rewards.length import overlong_penalties, overlong_penalty

DAPO = {"max_tokens": 20480, "buffer_tokens": 4096, "penalty": 1.0}


@pytest.mark.parametrize(
    "length, expected",
    [
        (0, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (17408, -0.25),
        (18432, -0.5),
        (20480, -1.0),
        (20481, -1.0),
        (10**9, -1.0),
    ],
)
def test_equation_13_of_dapo(length, expected):
    assert overlong_penalty(length, **DAPO) == expected


def test_the_penalty_scales_it_and_nothing_is_minus_zero():
    assert overlong_penalty(18, max_tokens=20, buffer_tokens=4, penalty=3.0) == -1.5
    assert str(overlong_penalty(1, max_tokens=20, buffer_tokens=4, penalty=3.0)) == "0.0"
    assert overlong_penalty(20, max_tokens=20, buffer_tokens=20, penalty=0.0) == 0.0


def test_arrays_are_the_same_one_by_one():
    lengths = np.array([[0, 16384, 17000], [20479, 20480, 30000]], dtype=np.int32)
    penalties = overlong_penalties(lengths, **DAPO)
    assert penalties.shape == lengths.shape and penalties.dtype == np.float64
    assert [[overlong_penalty(int(n), **DAPO) for n in row] for row in lengths] == penalties.tolist()


@pytest.mark.parametrize(
    "wrong", [{"buffer_tokens": 0}, {"buffer_tokens": 20481}, {"buffer_tokens": -1}, {"penalty": -1.0}]
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="overlong penalty"):
        overlong_penalty(1, **{**DAPO, **wrong})
