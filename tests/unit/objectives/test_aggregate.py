import numpy as np
import pytest
import torch

from rl.objectives.aggregate import aggregate
from tests.each import each

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
NORM = 7.0


def reference(token_loss, mask, lengths, mode):
    """Sample by sample, float64: value and gradient of the whole mini-batch."""
    ends = np.cumsum(lengths)
    value, grad = 0.0, np.zeros(len(token_loss))
    for end, length in zip(ends, lengths):
        kept = [t for t in range(end - length, end) if mask[t]]
        weight = {
            "token-mean": 1 / max(sum(mask), 1),
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / len(lengths),
            "seq-mean-token-mean": 1 / len(lengths) / max(len(kept), 1),
            "seq-mean-token-sum-norm": 1 / len(lengths) / NORM,
        }[mode]
        for t in kept:
            value += weight * token_loss[t]
            grad[t] = weight
    return value, grad


def batch(seed, dtype=torch.float64, num_samples=12):
    """token_loss, mask, lengths; with empty and one-token samples, a wholly masked one, and zeros inside
    masks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 40, (num_samples,), generator=generator)
    lengths[[0, 5, num_samples - 1]] = 0
    lengths[[1, 7]] = 1
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) > 0.3
    start = int(lengths[:3].sum())
    mask[start : start + int(lengths[3])] = False
    return torch.randn(total, generator=generator, dtype=torch.float64).to(dtype), mask, lengths


def denominators(mask, lengths):
    return dict(num_tokens=int(mask.sum()), num_samples=len(lengths), norm=NORM)


# Two samples and an empty one; the first token of the second is masked.
@each(
    "mode, expected",
    [
        ("token-mean", 15 / 4),
        ("token-sum", 15.0),
        ("seq-mean-token-sum", 15 / 3),
        ("seq-mean-token-mean", (1.5 + 6.0) / 3),
        ("seq-mean-token-sum-norm", 15 / 3 / 7),
    ],
)
def test_hand_numbers(mode, expected):
    token_loss, mask = torch.tensor([1.0, 2.0, 100.0, 4.0, 8.0]), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    loss = aggregate(token_loss, mask, torch.tensor([2, 0, 3]), mode, num_tokens=4, num_samples=3, norm=NORM)
    assert loss.dim() == 0 and loss.item() == pytest.approx(expected)


@each("mode", MODES)
@each("seed", range(3))
def test_value_and_gradient_against_the_reference(seed, mode):
    token_loss, mask, lengths = batch(seed)
    leaf = token_loss.requires_grad_()
    loss = aggregate(leaf, mask, lengths, mode, **denominators(mask, lengths))
    (grad,) = torch.autograd.grad(loss, leaf)
    value, expected_grad = reference(leaf.tolist(), mask.tolist(), lengths.tolist(), mode)
    assert loss.item() == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-12)


@each("mode", MODES)
@each("bad", [float("nan"), float("inf")])
def test_masked_positions_never_reach_value_or_gradient(bad, mode):
    token_loss, mask, lengths = batch(1)
    clean = aggregate(token_loss, mask, lengths, mode, **denominators(mask, lengths))
    leaf = torch.where(mask, token_loss, bad).requires_grad_()
    dirty = aggregate(leaf, mask, lengths, mode, **denominators(mask, lengths))
    (grad,) = torch.autograd.grad(dirty, leaf)
    assert torch.equal(dirty, clean) and grad.isfinite().all() and not grad[~mask].any()


@each("mode", MODES)
@each("lengths", [[], [0, 0], [2, 1]])
def test_nothing_to_learn_from_gives_zero_and_a_zero_gradient(lengths, mode):
    leaf = torch.full((sum(lengths),), float("nan"), requires_grad=True)
    lengths = torch.tensor(lengths, dtype=torch.int64)
    mask = torch.zeros(len(leaf), dtype=torch.bool)
    loss = aggregate(leaf, mask, lengths, mode, **denominators(mask, lengths))
    (grad,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == 0 and not grad.any()


@each("norm", [None, 0])
def test_norm_is_required_where_it_is_used(norm):
    ones, lengths = torch.ones(1), torch.tensor([1])
    with pytest.raises(ValueError, match="norm"):
        aggregate(ones, ones, lengths, MODES[-1], num_tokens=1, num_samples=1, norm=norm)


def test_unknown_mode_is_refused_with_the_known_ones():
    ones, lengths = torch.ones(1), torch.tensor([1])
    with pytest.raises(ValueError, match="tokenmean.*token-mean, token-sum"):
        aggregate(ones, ones, lengths, "tokenmean", num_tokens=1, num_samples=1)
