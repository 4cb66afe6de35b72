"""AdamW with bfloat16 moments and with state in host memory."""

import pytest
import torch

from rl.training import compact_adam
from rl.training.compact_adam import CompactAdam, chosen, rounded
from rl.training.optimizer import MASTER

SHAPES = (70_000, 1, 3_000, 12_000)
OPTIONS = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
ULP = 2**-7
"""Relative distance of two bfloat16 numbers, at most."""


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SHAPES]


def optimizer(moments: torch.dtype, share: float, *, copies: bool = True):
    weights = tensors(0)
    groups = [{"params": weights[:2], **OPTIONS}, {"params": weights[2:], **OPTIONS | {"weight_decay": 0.0}}]
    held = chosen(weights, share)
    return weights, CompactAdam(groups, moments=moments, in_host=held, masters=held if copies else [])


def take_steps(weights, adam, number: int) -> None:
    for step in range(number):
        for weight, gradient in zip(weights, tensors(step + 1)):
            weight.grad = gradient
        adam.step()


def formula(number: int) -> list[tuple[torch.Tensor, ...]]:
    """Weights and moments after the steps, by arXiv:1711.05101 in float64."""
    lr, (beta1, beta2), eps, _ = OPTIONS.values()
    out = []
    for index, weight in enumerate(tensors(0)):
        weight, decay = weight.double(), 0.1 if index < 2 else 0.0
        m = v = torch.zeros_like(weight)
        for step in range(1, number + 1):
            g = tensors(step)[index].double()
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            direction = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
            weight = (1 - lr * decay) * weight - lr * direction
        out.append((weight, m, v))
    return out


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_one_step_is_the_formula(moments, share, monkeypatch):
    monkeypatch.setattr(compact_adam, "STAGED", 5_000)  # several messages; the last is short
    weights, adam = optimizer(moments, share)
    take_steps(weights, adam, 1)
    for weight, (exact, m, v) in zip(weights, formula(1)):
        state = adam.state[weight]
        assert (MASTER in state) == any(weight is held for held in chosen(weights, share))
        torch.testing.assert_close(weight.double(), exact, rtol=1e-6, atol=1e-6)
        error = 1e-6 if moments is torch.float32 else ULP
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is moments
        assert ((state["exp_avg"].double() - m).abs() <= error * m.abs()).all()
        assert ((state["exp_avg_sq"].double() - v).abs() <= error * v).all()


def test_three_steps_with_float32_moments_are_the_formula():
    weights, adam = optimizer(torch.float32, 0.5, copies=False)
    take_steps(weights, adam, 3)
    for weight, (exact, *_) in zip(weights, formula(3)):
        torch.testing.assert_close(weight.double(), exact, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("copies", [False, True])
def test_the_place_of_the_state_changes_no_bit(copies, monkeypatch):
    monkeypatch.setattr(compact_adam, "STAGED", 7_000)
    expected, device = optimizer(torch.bfloat16, 0.0)
    weights, host = optimizer(torch.bfloat16, 1.0, copies=copies)
    take_steps(expected, device, 3)
    take_steps(weights, host, 3)
    for a, b in zip(expected, weights):
        assert torch.equal(a, b)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(device.state[a][name], host.state[b][name])
        assert MASTER not in host.state[b] or torch.equal(b, host.state[b][MASTER])


def test_rounding_has_no_bias():
    values = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)) + 1  # ulp 2^-7
    bits = compact_adam._random_bits(values, values.flip(0), values.roll(1), 1)
    errors = rounded(values, bits).double() - values.double()
    # A mean of n errors, each below an ulp: standard deviation at most ulp / (2 sqrt(n)).
    assert abs(float(errors.mean())) < 5 * ULP / 2 / len(values) ** 0.5
    assert float(errors.abs().max()) < ULP and torch.equal(
        rounded(values.bfloat16().float(), bits), values.bfloat16()
    )
    negative = rounded(-values, bits)
    assert torch.equal(negative, -rounded(values, bits))


def test_a_second_moment_decays_without_gradients():
    weight = torch.zeros(1 << 14)
    adam = CompactAdam([{"params": [weight], **OPTIONS}], moments=torch.bfloat16)
    weight.grad = torch.rand(len(weight), generator=torch.Generator().manual_seed(0)) + 1
    adam.step()
    start = adam.state[weight]["exp_avg_sq"].double()
    weight.grad = torch.zeros_like(weight)
    for _ in range(500):
        adam.step()
    ratios = adam.state[weight]["exp_avg_sq"].double() / start
    # Rounding adds at most half an ulp of standard deviation per step, and older errors decay.
    spread = ULP / 2 * (500 / len(weight)) ** 0.5
    assert abs(float(ratios.mean()) - 0.999**500) < 5 * spread
    nearest = start[:1].bfloat16()
    assert torch.equal((nearest.float() * 0.999).bfloat16(), nearest), "rounding to nearest would not decay"


def test_chosen_weights_keep_to_the_share():
    weights = [torch.zeros(size) for size in (1000, 10, 400, 400, 10, 1000, 30, 700)]
    total = sum(map(len, weights))
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        held = sum(map(len, chosen(weights, share)))
        assert share * total - 1000 < held <= share * total
    assert len(chosen(weights, 1.0)) == len(weights)
