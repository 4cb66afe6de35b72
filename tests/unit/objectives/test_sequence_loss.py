import math

import numpy as np
import pytest
import torch

from rl.objectives.aggregate import aggregate
from rl.objectives.losses.gmpo import gmpo
from rl.objectives.losses.gspo import gspo
from tests.each import each

CLIPS = {gspo: dict(clip_low=0.05, clip_high=0.08), gmpo: dict(clip_low=0.2, clip_high=0.3)}
both = pytest.mark.parametrize("loss", CLIPS, ids=lambda loss: loss.__name__)


def samples_of(lengths, mask):
    """Indices of each sample's unmasked tokens."""
    ends = np.cumsum(lengths)
    return [[t for t in range(end - length, end) if mask[t]] for end, length in zip(ends, lengths)]


def reference_gspo(logprobs, old, advantages, mask, lengths, clip_low, clip_high):
    """Loss, the gradient of its sum for logprobs, and tokens cut: sample by sample, float64, by cases."""
    loss, grad, cut = np.zeros(len(mask)), np.zeros(len(mask)), 0
    for tokens in samples_of(lengths, mask):
        mean = sum(logprobs[t] - old[t] for t in tokens) / max(len(tokens), 1)
        ratio = math.exp(min(mean, 10.0))
        for t in tokens:
            bound = 1 + clip_high if advantages[t] > 0 else 1 - clip_low
            if (ratio - bound) * advantages[t] > 0:
                loss[t], cut = -advantages[t] * bound, cut + 1
            else:
                loss[t] = -advantages[t] * ratio
                grad[t] = loss[t] if mean <= 10 else 0.0
    return loss, grad, cut


def reference_gmpo(logprobs, old, advantages, mask, lengths, clip_low, clip_high):
    loss, grad, cut = np.zeros(len(mask)), np.zeros(len(mask)), 0
    for tokens in samples_of(lengths, mask):
        if not tokens:
            continue
        advantage = sum(advantages[t] for t in tokens) / len(tokens)
        total, free = 0.0, []
        for t in tokens:
            d = logprobs[t] - old[t]
            if advantage > 0 and d > clip_high:
                total, cut = total + clip_high, cut + 1
            elif advantage < 0 and d < -clip_low:
                total, cut = total - clip_low, cut + 1
            else:
                total, free = total + d, [*free, t]
        mean = total / len(tokens)
        loss[tokens] = -advantage * math.exp(min(max(mean, -20.0), 20.0))
        # The loss stands on each of the tokens, and its derivative for one of them is 1 / len(tokens) of it.
        grad[free] = loss[tokens[0]] if abs(mean) <= 20 else 0.0
    return loss, grad, cut


REFERENCES = {gspo: reference_gspo, gmpo: reference_gmpo}


def batch(seed, num_samples=14):
    """Arrays of float64; empty, one-token and wholly masked samples, samples without advantage, one far
    off."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 15, num_samples)
    lengths[[0, 5, num_samples - 1]], lengths[[1, 7]] = 0, 1
    size = lengths.sum()
    old = rng.normal(-2, 1, size)
    logprobs = old + rng.normal(0, 0.3, size) + np.repeat(rng.normal(0, 0.1, num_samples), lengths)
    mask = rng.random(size) > 0.2
    ends = np.cumsum(lengths)
    mask[ends[2] : ends[3]] = False
    logprobs[ends[3] : ends[4]] += 50.0
    per_sample = rng.normal(size=num_samples) * (rng.random(num_samples) > 0.15)
    return logprobs, old, np.repeat(per_sample, lengths), mask, lengths


def tensors(*arrays):
    return [torch.tensor(array) for array in arrays]


@both
@each("per_token", [False, True])
@each("seed", range(4))
def test_value_gradient_and_statistics_against_the_reference(seed, per_token, loss):
    logprobs, old, advantages, mask, lengths = batch(seed)
    if per_token:
        advantages = advantages + np.random.default_rng(seed).normal(0, 0.5, len(advantages))
    expected_loss, expected_grad, cut = REFERENCES[loss](
        logprobs, old, advantages, mask, lengths, **CLIPS[loss]
    )
    leaf = torch.tensor(logprobs, requires_grad=True)
    token_loss, stats = loss(leaf, *tensors(old, advantages, mask, lengths), **CLIPS[loss])
    (grad,) = torch.autograd.grad(token_loss.sum(), leaf)
    np.testing.assert_allclose(token_loss.detach(), expected_loss, rtol=1e-9)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-9)
    assert stats.keys() == {"ppo_kl", "pg_clipfrac"}
    assert stats["pg_clipfrac"].item() == cut > 0
    assert stats["ppo_kl"].item() == pytest.approx(np.clip(old - logprobs, -20, 20)[mask].sum(), rel=1e-12)
    assert not any(value.requires_grad or value.dim() for value in stats.values())


def test_gspo_hand_numbers():
    # Sample 1: ratios 4 and 1, geometric mean 2, cut at 1.5 for the positive advantage only. Sample 2: ratio
    # 1/2, kept.
    leaf = torch.tensor([math.log(4.0), 0.0, math.log(0.5)], requires_grad=True)
    advantages, lengths = torch.tensor([1.0, -1.0, 3.0]), torch.tensor([2, 1])
    token_loss, stats = gspo(
        leaf, torch.zeros(3), advantages, torch.ones(3), lengths, clip_low=0.5, clip_high=0.5
    )
    assert token_loss.tolist() == pytest.approx([-1.5, 2.0, -1.5])
    assert torch.autograd.grad(token_loss.sum(), leaf)[0].tolist() == pytest.approx([0.0, 2.0, -1.5])
    assert stats["pg_clipfrac"].item() == 1 and stats["ppo_kl"].item() == pytest.approx(-math.log(2))


def test_gspo_caps_the_ratio_of_a_sample_at_e_to_the_10():
    # Two samples with mean log-ratios of 9.5 and 12; the first has a token far beyond.
    leaf = torch.tensor([19.0, 0.0, 12.0], requires_grad=True)
    lengths, minus = torch.tensor([2, 1]), -torch.ones(3)
    token_loss, _ = gspo(leaf, torch.zeros(3), minus, torch.ones(3), lengths, clip_low=0.5, clip_high=0.5)
    assert token_loss.tolist() == pytest.approx([math.exp(9.5), math.exp(9.5), math.exp(10.0)], rel=1e-6)
    grad = torch.autograd.grad(token_loss.sum(), leaf)[0].tolist()
    assert grad == pytest.approx([math.exp(9.5), math.exp(9.5), 0.0], rel=1e-6)


def test_gmpo_hand_numbers():
    # Sample 1: log-ratios 1 (cut to 0.5) and -1.5 (kept as the advantage is positive); mean -0.5. Sample 2:
    # -2, cut to -0.5.
    leaf = torch.tensor([1.0, -1.5, -2.0], requires_grad=True)
    advantages, lengths = torch.tensor([2.0, 2.0, -1.0]), torch.tensor([2, 1])
    token_loss, stats = gmpo(
        leaf, torch.zeros(3), advantages, torch.ones(3), lengths, clip_low=0.5, clip_high=0.5
    )
    expected = -2 * math.exp(-0.5)
    assert token_loss.tolist() == pytest.approx([expected, expected, math.exp(-0.5)])
    assert torch.autograd.grad(token_loss.sum(), leaf)[0].tolist() == pytest.approx([0.0, expected, 0.0])
    assert stats["pg_clipfrac"].item() == 2


def test_gspo_equals_the_sequence_objective():
    logprobs, old, advantages, mask, lengths = tensors(*batch(11))
    leaf = logprobs.requires_grad_()
    token_loss, _ = gspo(leaf, old, advantages, mask, lengths, **CLIPS[gspo])
    counts = dict(num_tokens=int(mask.sum()), num_samples=len(lengths))
    token_form = aggregate(token_loss, mask, lengths, "seq-mean-token-mean", **counts)

    objective = 0.0
    for tokens in samples_of(lengths.tolist(), mask.tolist()):
        if tokens:
            mean = (leaf[tokens] - old[tokens]).mean()
            ratio, advantage = torch.exp(mean.clamp(max=10)), advantages[tokens[0]]
            objective = objective - torch.minimum(
                ratio * advantage, ratio.clamp(0.95, 1.08) * advantage
            ) / len(lengths)
    torch.testing.assert_close(token_form, objective)
    grads = [torch.autograd.grad(value, leaf)[0] for value in (token_form, objective)]
    torch.testing.assert_close(*grads)


def test_gspo_resolves_the_narrow_bounds_of_the_paper_in_float32():
    lengths = torch.tensor([2000, 2000])
    old = -torch.rand(4000, generator=torch.Generator().manual_seed(0))
    logprobs = old + torch.repeat_interleave(torch.tensor([2e-4, 6e-4]), lengths)
    ones = torch.ones(4000)
    token_loss, stats = gspo(logprobs, old, ones, ones, lengths, clip_low=3e-4, clip_high=4e-4)
    assert stats["pg_clipfrac"].item() == 2000
    assert -token_loss[0].item() - 1 == pytest.approx(2e-4, rel=1e-2)
