import math

import numpy as np
import pytest
import torch

from rl.objectives.value_loss import explained_variance, value_loss
from tests.each import each

CLIP_RANGES = [0.0, 0.2, 0.5, math.inf]


def reference(values, old_values, returns, mask, clip):
    """Token by token, float64, by cases: loss, gradient for values, tokens cut."""
    loss, grad, cut = np.zeros(len(mask)), np.zeros(len(mask)), 0
    for t in range(len(mask)):
        if not mask[t]:
            continue
        error, moved = values[t] - returns[t], values[t] - old_values[t]
        bound = old_values[t] + math.copysign(clip, moved) if clip and abs(moved) > clip else values[t]
        if abs(bound - returns[t]) > abs(error):
            loss[t], cut = 0.5 * (bound - returns[t]) ** 2, cut + 1
        else:
            loss[t], grad[t] = 0.5 * error**2, error
    return loss, grad, cut


def batch(seed, size=200):
    """values, old_values, returns, mask as tensors, float64 and bool."""
    rng = np.random.default_rng(seed)
    old = rng.normal(size=size)
    return [
        torch.tensor(x)
        for x in (old + rng.normal(0, 0.5, size), old, rng.normal(size=size), rng.random(size) > 0.2)
    ]


@each(
    "value, old, target, loss, slope, cut",
    [
        (1.1, 1.0, 2.0, 0.405, -0.9, 0),
        (1.5, 1.0, 2.0, 0.32, 0.0, 1),  # has moved 0.5 towards its return: held at 1.2
        (0.5, 1.0, 2.0, 1.125, -1.5, 0),  # has moved away: free to come back
        (2.0, 1.0, 1.0, 0.5, 1.0, 0),
    ],
)
def test_hand_numbers(value, old, target, loss, slope, cut):
    leaf = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old, target = torch.tensor([old], dtype=torch.float64), torch.tensor([target], dtype=torch.float64)
    token_loss, stats = value_loss(leaf, old, target, torch.ones(1), clip=0.2)
    assert token_loss.item() == pytest.approx(loss)
    assert torch.autograd.grad(token_loss.sum(), leaf)[0].item() == pytest.approx(slope)
    assert stats["vf_clipfrac"].item() == cut and stats["vpred_mean"].item() == value


@each("clip", CLIP_RANGES)
@each("seed", range(3))
def test_value_gradient_and_statistics_against_the_reference(seed, clip):
    values, old, returns, mask = batch(seed)
    expected_loss, expected_grad, cut = reference(*(x.tolist() for x in (values, old, returns, mask)), clip)
    leaf = values.clone().requires_grad_()
    token_loss, stats = value_loss(leaf, old, returns, mask, clip=clip)
    (grad,) = torch.autograd.grad(token_loss.sum(), leaf)
    np.testing.assert_allclose(token_loss.detach(), expected_loss, rtol=1e-12)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-12)
    assert stats["vf_clipfrac"].item() == cut and (cut > 0) == (0 < clip < math.inf)
    assert stats["vpred_mean"].item() == pytest.approx(values[mask].sum().item(), rel=1e-12)
    assert not any(value.requires_grad or value.dim() for value in stats.values())


def test_values_inside_the_clip_are_not_counted_as_cut():
    values, old, returns, mask = (x.float() for x in batch(5, size=5000))
    _, stats = value_loss(old + 0.01 * values, old, returns, mask, clip=0.5)
    assert stats["vf_clipfrac"].item() == 0


@each("clip", CLIP_RANGES)
@each("as_float", [False, True])
@each("bad", [float("nan"), float("inf"), -float("inf")])
def test_masked_positions_enter_nothing(bad, as_float, clip):
    *columns, mask = batch(4)

    def outcome(fill, mask_given):
        leaf, *rest = (torch.where(mask, x, fill) for x in columns)
        token_loss, stats = value_loss(leaf.requires_grad_(), *rest, mask_given, clip=clip)
        return token_loss, torch.autograd.grad(token_loss.sum(), leaf)[0], stats

    clean_loss, clean_grad, clean_stats = outcome(0.0, mask)
    token_loss, grad, stats = outcome(bad, mask.double() if as_float else mask)
    assert torch.equal(token_loss, clean_loss) and torch.equal(grad, clean_grad) and stats == clean_stats
    assert not token_loss[~mask].any() and not grad[~mask].any() and grad.any()
    assert explained_variance(
        torch.where(mask, columns[0], bad), torch.where(mask, columns[2], bad), mask
    ) == (explained_variance(columns[0], columns[2], mask))


def test_empty_micro_batch_gives_nothing():
    empty = torch.zeros(0, requires_grad=True)
    token_loss, stats = value_loss(empty, *[torch.zeros(0)] * 3, clip=0.2)
    token_loss.sum().backward()
    assert token_loss.shape == empty.grad.shape == (0,) and all(value.item() == 0 for value in stats.values())


@each("clip", [-0.1, float("nan")])
def test_a_clip_that_is_no_distance_is_refused(clip):
    with pytest.raises(ValueError, match="clip"):
        value_loss(*[torch.zeros(1)] * 4, clip=clip)


def test_explained_variance_of_extreme_critics():
    returns, ones = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.ones(4)
    assert explained_variance(returns, returns, ones) == 1
    assert explained_variance(returns + 5, returns, ones) == 1  # a constant bias is not variance
    assert explained_variance(ones, returns, ones) == 0
    assert explained_variance(-returns, returns, ones) == -3
    # Returns 1, 2, 3 with errors 0, 0, 1: variances 2/3 and 2/9.
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(torch.tensor([1.0, 2.0, 2.0, 0.0]), returns, mask) == pytest.approx(2 / 3)


def test_explained_variance_against_numpy():
    values, _, returns, mask = batch(6)
    kept = mask.numpy()
    expected = 1 - np.var((returns - values).numpy()[kept]) / np.var(returns.numpy()[kept])
    assert explained_variance(values, returns, mask) == pytest.approx(expected, rel=1e-12)
    shifted = [(x + 1000).float() for x in (values, returns)]
    assert explained_variance(*shifted, mask) == pytest.approx(expected, abs=1e-3)


@each("returns, mask", [([], []), ([1.0, 2.0], [0.0, 0.0]), ([3.0], [1.0]), ([0.1] * 7, [1.0] * 7)])
def test_explained_variance_of_returns_without_variance_is_nan(returns, mask):
    returns = torch.tensor(returns)
    assert math.isnan(explained_variance(torch.zeros(len(returns)), returns, torch.tensor(mask)))
