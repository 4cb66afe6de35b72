import math
from types import SimpleNamespace

import numpy as np
import pytest

from rl.checkpoint.start import WronglySaved, check_controllers
from rl.objectives.entropy_controller import EntropyController
from rl.objectives.kl_controller import AdaptiveKL, FixedKL
from tests.each import each


def test_fixed_weight_stays():
    controller = FixedKL(0.05)
    controller.update(100.0, 1000)
    assert controller.coef == 0.05
    controller.load_state_dict(controller.state_dict())
    controller.load_state_dict({"coef": 3.0})
    assert controller.coef == 0.05


@each(
    "current_kl, factor",
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 0.05),
        (5.4, 1 - 0.1 * 0.05),
        (7.2, 1 + 0.2 * 0.05),
        (1000.0, 1 + 0.2 * 0.05),  # clipped
        (math.inf, 1 + 0.2 * 0.05),
        (0.0, 1 - 0.2 * 0.05),
        (-3.0, 1 - 0.2 * 0.05),
    ],
)
def test_adaptive_weight_follows_the_clipped_relative_error(current_kl, factor):
    controller = AdaptiveKL(0.2, target=6.0, horizon=10_000)
    controller.update(current_kl, 500)
    assert controller.coef == pytest.approx(0.2 * factor, rel=1e-12)


def test_checkpoint_continues_where_it_was():
    first, second = (AdaptiveKL(0.1, target=6.0, horizon=1000) for _ in range(2))
    first.update(9.0, 64)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(3.0, 64)
    assert second.coef == first.coef != 0.1


def test_checkpoint_of_a_fixed_weight_is_refused():
    with pytest.raises(ValueError, match="fixed"):
        AdaptiveKL(0.1, target=6.0, horizon=1000).load_state_dict(FixedKL(0.1).state_dict())


@each(
    "arguments",
    [(0.0, 6.0, 1000), (0.1, 0.0, 1000), (0.1, 6.0, 0), (math.nan, 6.0, 1000), (0.1, math.inf, 1000)],
)
def test_settings_that_cannot_steer_are_refused(arguments):
    with pytest.raises(ValueError, match="positive"):
        AdaptiveKL(*arguments)


def test_nan_divergence_is_refused_and_leaves_the_weight():
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    with pytest.raises(ValueError, match="NaN"):
        controller.update(math.nan, 64)
    assert controller.coef == 0.1


def test_horizon_that_could_turn_the_weight_negative_is_refused():
    controller = AdaptiveKL(0.1, target=6.0, horizon=100)
    controller.update(0.0, 499)
    assert controller.coef > 0
    with pytest.raises(ValueError, match="horizon"):
        controller.update(0.0, 500)


def test_a_checkpoint_has_each_controller_even_if_two_are_equal():
    entropy = EntropyController(0.1, target=1.0, delta=0.1, low=0.0, high=1.0)
    adaptive = AdaptiveKL(0.1, target=6.0, horizon=1000)
    phases = [SimpleNamespace(own=adaptive), SimpleNamespace(own=entropy, other=adaptive)]
    state = {"order": np.arange(3), "kl_controller": {"coef": 0.1}}
    with pytest.raises(WronglySaved, match="would lack {'coef': 0.1} of EntropyController"):
        check_controllers(state, phases)
    check_controllers(state | {"entropy_control": {"coef": 0.1}}, phases)
