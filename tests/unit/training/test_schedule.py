import math

import pytest

from rl.config.schema import Optimizer
from rl.training.schedule import learning_rate


def rates(max_steps, **optimizer):
    """Learning rates of all steps of a run."""
    return [learning_rate(Optimizer(**optimizer), step, max_steps) for step in range(1, max_steps + 1)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_from_the_first_step_to_lr(schedule):
    assert rates(20, lr=1.0, warmup_steps=4, schedule=schedule)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_without_warm_up_the_first_step_has_the_whole_rate():
    for schedule in ("constant", "linear", "cosine"):
        assert rates(10, lr=3e-4, min_lr=1e-4, schedule=schedule)[0] == 3e-4


def test_constant_stays_at_lr_and_ignores_min_lr():
    assert rates(50, lr=2e-5, min_lr=1e-6, warmup_steps=2, schedule="constant")[2:] == [2e-5] * 48


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_goes_from_lr_to_min_lr_after_the_last_step(schedule):
    """With min_lr 0 the last step still has a positive rate."""
    optimizer = Optimizer(lr=1.0, min_lr=0.1, warmup_steps=3, schedule=schedule)
    assert learning_rate(optimizer, 4, 23) == 1.0
    assert learning_rate(optimizer, 14, 23) == pytest.approx(0.55)  # half of the 20 steps of decay
    assert learning_rate(optimizer, 24, 23) == pytest.approx(0.1)
    assert rates(23, lr=1.0, warmup_steps=3, schedule=schedule)[-1] > 0


@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_is_monotonic_between_lr_and_min_lr(schedule, warmup_steps):
    found = rates(100, lr=1e-3, min_lr=1e-5, warmup_steps=warmup_steps, schedule=schedule)[warmup_steps:]
    assert all(later < earlier for earlier, later in zip(found, found[1:]))
    assert found[0] == 1e-3 and found[-1] > 1e-5


def test_linear_falls_by_the_same_amount_each_step():
    assert rates(5, lr=1.0, schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_falls_slowly_first_and_last():
    found = rates(4, lr=1.0, schedule="cosine")
    assert found == pytest.approx([1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_that_ends_within_its_warm_up_only_warms_up(schedule):
    assert rates(3, lr=1.0, warmup_steps=6, schedule=schedule) == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert rates(3, lr=1.0, warmup_steps=3, schedule=schedule) == pytest.approx([1 / 3, 2 / 3, 1])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_has_the_whole_rate(schedule):
    assert rates(1, lr=1e-6, schedule=schedule) == [1e-6]


def test_the_rate_is_a_function_of_the_step_alone():
    """A resumed run computes step 30 first."""
    optimizer = Optimizer(lr=1.0, warmup_steps=10, schedule="cosine")
    whole = rates(60, lr=1.0, warmup_steps=10, schedule="cosine")
    assert [learning_rate(optimizer, step, 60) for step in (30, 31, 5)] == [whole[29], whole[30], whole[4]]
