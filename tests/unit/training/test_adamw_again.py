"""The arithmetic of an optimizer step, computed again."""

import pytest
import torch

from rl.config.schema import Optimizer
from rl.training.compact_adam import rounded
from rl.training.optimizer import _adamw, _is_biased


def steps_of_torch(adam: Optimizer, decay: float, number: int):
    """Yield weights and moments before and after each step of torch's AdamW in float32, with the gradient."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1000, generator=generator))
    options = dict(lr=adam.lr, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=decay)
    optimizer = torch.optim.AdamW([weight], **options)

    def present():
        state = optimizer.state[weight]
        moments = [state.get(key, torch.zeros(1000)) for key in ("exp_avg", "exp_avg_sq")]
        return torch.stack([weight.detach(), *moments]).double()

    for _ in range(number):
        before = present()
        sizes = 10.0 ** torch.randint(-9, 2, (1000,), generator=generator)
        weight.grad = torch.randn(1000, generator=generator) * sizes
        optimizer.step()
        yield before, present(), weight.grad


ADAM = Optimizer(lr=1e-3, weight_decay=0.1)


def outside(before, after, gradient, step, *, decays=True, adam=ADAM, lr=ADAM.lr) -> int:
    flags = torch.full((1000,), decays)
    expected, tolerance = _adamw(before, gradient, flags, adam, lr, step)
    return int(((after - expected).abs() > tolerance).sum())


@pytest.mark.parametrize("decays", [True, False])
def test_right_steps_are_within_rounding(decays):
    decay = ADAM.weight_decay * decays
    for step, found in enumerate(steps_of_torch(ADAM, decay, 20), start=1):
        assert outside(*found, step, decays=decays) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        dict(decays=False),
        dict(lr=1.01e-3),
        dict(adam=Optimizer(lr=1e-3, weight_decay=0.1, beta2=0.99)),
        dict(adam=Optimizer(lr=1e-3, weight_decay=0.11)),
    ],
    ids=["decay", "rate", "beta2", "size of the decay"],
)
def test_other_keys_give_other_steps(wrong):
    for step, found in enumerate(steps_of_torch(ADAM, ADAM.weight_decay, 3), start=1):
        assert outside(*found, step, **wrong) > 100


def test_a_step_count_that_begins_again_is_found():
    *_, last = steps_of_torch(ADAM, ADAM.weight_decay, 5)
    assert outside(*last, 1) > 100


def test_kernels_may_hold_one_minus_beta_in_float32():
    adam = Optimizer(lr=1e-3, beta2=0.99999)
    for step, (before, after, gradient) in enumerate(steps_of_torch(adam, 0.0, 3), start=1):
        after[2] = before[2] * 0.99999 + float(1 - torch.tensor(0.99999)) * gradient.double().square()
        assert outside(before, after, gradient, step, adam=adam) == 0


def test_moments_that_are_rounded_with_a_bias_are_found():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        exact = torch.randn(2000, generator=generator) * torch.rand(2000, generator=generator) ** 4
        bits = torch.randint(-(2**31), 2**31, (2000,), generator=generator).int()
        forms = dict(
            stochastic=rounded(exact, bits),
            nearest=exact.bfloat16(),
            down=rounded(exact, bits * 0),
            half=rounded(exact, bits & 0x7FFF),
        )
        pair = exact.double().abs().expand(2, -1)
        for name, found in forms.items():
            assert _is_biased(found.double().abs().expand(2, -1), pair).tolist() == [name != "stochastic"] * 2
