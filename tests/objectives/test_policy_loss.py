import math

import numpy as np
import pytest
import torch

from rl.objectives.policy_loss import ppo

CLIPS = [
    dict(clip_low=0.2, clip_high=0.2, dual_clip=0.0),
    dict(clip_low=0.2, clip_high=0.28, dual_clip=0.0),
    dict(clip_low=0.1, clip_high=0.3, dual_clip=1.5),
]


def reference(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip):
    """Token by token, float64, by cases instead of min and max. Returns loss, gradient for logprobs, statistics."""
    loss, grad = np.zeros(len(mask)), np.zeros(len(mask))
    stats = {"ppo_kl": 0.0, "pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0}
    for t in range(len(mask)):
        if not mask[t]:
            continue
        raw = logprobs[t] - old_logprobs[t]
        log_ratio, saturated = min(max(raw, -20.0), 20.0), abs(raw) > 20.0
        ratio, advantage = math.exp(log_ratio), advantages[t]
        stats["ppo_kl"] -= log_ratio
        cut_above = advantage > 0 and ratio > 1 + clip_high
        cut_below = advantage < 0 and ratio < 1 - clip_low
        if cut_above or cut_below:
            loss[t] = -advantage * (1 + clip_high if cut_above else 1 - clip_low)
            stats["pg_clipfrac"] += 1
        elif dual_clip and advantage < 0 and ratio > dual_clip:
            loss[t] = -advantage * dual_clip
            stats["pg_clipfrac_lower"] += 1
        else:
            loss[t] = -advantage * ratio
            grad[t] = 0.0 if saturated else -advantage * ratio
    return loss, grad, stats


def batch(seed, size=200):
    """logprobs, old_logprobs, advantages, mask as float64 arrays; a spread of ratios, some zero advantages and masks."""
    rng = np.random.default_rng(seed)
    old = rng.normal(-2, 1, size)
    logprobs = old + rng.normal(0, 0.5, size)
    logprobs[:4] = old[:4] + [25.0, -25.0, 25.0, -25.0]
    advantages = rng.normal(size=size) * (rng.random(size) > 0.1)
    return logprobs, old, advantages, rng.random(size) > 0.2


def tensors(*arrays):
    return [torch.tensor(array) for array in arrays]


@pytest.mark.parametrize(
    "ratio, advantage, loss, clipped, lower",
    [
        (1.0, 2.0, -2.0, 0, 0),
        (1.1, 2.0, -2.2, 0, 0),
        (1.5, 2.0, -2.6, 1, 0),  # above 1 + clip_high with positive advantage: cut
        (0.5, 2.0, -1.0, 0, 0),  # below, positive: the gradient may bring it back
        (0.5, -2.0, 1.6, 1, 0),  # below 1 - clip_low with negative advantage: cut
        (1.5, -2.0, 3.0, 0, 0),
        (4.0, -2.0, 6.0, 0, 1),  # dual clip at 3
        (4.0, 0.0, 0.0, 0, 0),
    ],
)
def test_hand_numbers(ratio, advantage, loss, clipped, lower):
    arguments = torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), torch.ones(1)
    token_loss, stats = ppo(*arguments, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert token_loss.item() == pytest.approx(loss)
    assert (stats["pg_clipfrac"].item(), stats["pg_clipfrac_lower"].item()) == (clipped, lower)
    assert stats["ppo_kl"].item() == pytest.approx(-math.log(ratio))


@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_statistics_against_the_reference(seed, clips):
    logprobs, old, advantages, mask = batch(seed)
    expected_loss, expected_grad, expected_stats = reference(logprobs, old, advantages, mask, **clips)
    leaf = torch.tensor(logprobs, requires_grad=True)
    token_loss, stats = ppo(leaf, *tensors(old, advantages, mask), **clips)
    (grad,) = torch.autograd.grad(token_loss.sum(), leaf)
    np.testing.assert_allclose(token_loss.detach(), expected_loss, rtol=1e-12)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-12)
    assert stats.keys() == expected_stats.keys()
    for name, value in stats.items():
        assert value.item() == pytest.approx(expected_stats[name], rel=1e-12) and not value.requires_grad
    assert expected_stats["pg_clipfrac"] > 0 and (not clips["dual_clip"] or expected_stats["pg_clipfrac_lower"] > 0)


@pytest.mark.parametrize("clips", CLIPS)
def test_gradient_against_finite_differences(clips):
    logprobs, old, advantages, mask = batch(3, size=40)
    arguments = tensors(old, advantages, mask)
    leaf = torch.tensor(logprobs, requires_grad=True)
    assert torch.autograd.gradcheck(lambda leaf: ppo(leaf, *arguments, **clips)[0], (leaf,))


def test_on_policy_gradient_is_minus_the_advantage():
    logprobs = torch.randn(6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 0.0, 2.5, -3.0, 0.1])
    token_loss, stats = ppo(logprobs, logprobs.detach(), advantages, torch.ones(6), **CLIPS[2])
    (grad,) = torch.autograd.grad(token_loss.sum(), logprobs)
    assert torch.equal(grad, -advantages)
    assert all(value.item() == 0 for value in stats.values())


def test_log_ratio_is_clamped_before_exp():
    advantages = torch.tensor([-1.0, -1.0])
    logprobs = torch.tensor([200.0, -200.0], requires_grad=True)
    token_loss, stats = ppo(logprobs, torch.zeros(2), advantages, torch.ones(2), **CLIPS[0])
    assert token_loss.tolist() == pytest.approx([math.exp(20.0), 0.8])
    assert torch.autograd.grad(token_loss.sum(), logprobs)[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_masked_positions_never_reach_value_gradient_or_statistics(bad, as_float):
    logprobs, old, advantages, mask = tensors(*batch(4))
    clips = CLIPS[2]
    clean_leaf = logprobs.clone().requires_grad_()
    clean_loss, clean_stats = ppo(clean_leaf, old, advantages, mask, **clips)
    (clean_grad,) = torch.autograd.grad(clean_loss.sum(), clean_leaf)

    dirty = [torch.where(mask, x, bad) for x in (logprobs, old, advantages)]
    leaf = dirty[0].requires_grad_()
    token_loss, stats = ppo(leaf, *dirty[1:], mask.double() if as_float else mask, **clips)
    (grad,) = torch.autograd.grad(token_loss.sum(), leaf)
    assert torch.equal(token_loss, clean_loss) and torch.equal(grad, clean_grad) and stats == clean_stats
    assert not token_loss[~mask].any() and not grad[~mask].any()


@pytest.mark.parametrize("size, kept", [(0, 0), (1, 1), (1, 0)])
def test_no_token_and_one_token(size, kept):
    logprobs = torch.zeros(size, requires_grad=True)
    mask = torch.full((size,), bool(kept))
    token_loss, stats = ppo(logprobs, torch.zeros(size), torch.ones(size), mask, **CLIPS[1])
    assert token_loss.tolist() == [-1.0 * kept] * size
    token_loss.sum().backward()
    assert logprobs.grad.tolist() == [-1.0 * kept] * size
    assert all(value.item() == 0 and value.dim() == 0 for value in stats.values())


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0])
def test_dual_clip_that_would_undo_the_clip_is_refused(dual_clip):
    with pytest.raises(ValueError, match="dual_clip"):
        ppo(*[torch.zeros(1)] * 4, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)
