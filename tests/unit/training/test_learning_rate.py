"""Learning rates of all steps of short runs."""

import math

import pytest

from rl.config.schema import Optimizer
from rl.training.learning_rate import learning_rate


def rates(max_steps, **optimizer):
    """Learning rates of all steps of a run."""
    return [learning_rate(Optimizer(**optimizer), step, max_steps) for step in range(1, max_steps + 1)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_from_the_first_step_to_lr(schedule):
    assert rates(20, lr=1.0, warmup_steps=4, schedule=schedule)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(10, lr=3e-4, min_lr=1e-4, schedule=schedule)[0] == 3e-4
    assert rates(1, lr=1e-6, schedule=schedule) == [1e-6]
    # Runs that end within, and with, their warm-up.
    assert rates(3, lr=1.0, warmup_steps=6, schedule=schedule) == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert rates(3, lr=1.0, warmup_steps=3, schedule=schedule) == pytest.approx([1 / 3, 2 / 3, 1])


def test_rates_after_the_warm_up():
    assert rates(50, lr=2e-5, min_lr=1e-6, warmup_steps=2, schedule="constant")[2:] == [2e-5] * 48
    assert rates(5, lr=1.0, schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    root = math.sqrt(0.125)
    assert rates(4, lr=1.0, schedule="cosine") == pytest.approx([1.0, 0.5 + root, 0.5, 0.5 - root])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_goes_from_lr_to_min_lr_after_the_last_step(schedule):
    """With min_lr 0 the last step still has a positive rate."""
    optimizer = Optimizer(lr=1.0, min_lr=0.1, warmup_steps=3, schedule=schedule)
    assert learning_rate(optimizer, 4, 23) == 1.0
    assert learning_rate(optimizer, 14, 23) == pytest.approx(0.55)  # half of the 20 steps of decay
    assert learning_rate(optimizer, 24, 23) == pytest.approx(0.1)
    assert rates(23, lr=1.0, warmup_steps=3, schedule=schedule)[-1] > 0
