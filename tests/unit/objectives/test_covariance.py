import math

import numpy as np
import pytest
import torch

from rl.objectives.losses.clip_cov import clip_cov
from rl.objectives.losses.clip_cov import select_tokens as clip_cov_tokens
from rl.objectives.losses.kl_cov import kl_cov
from rl.objectives.losses.kl_cov import select_tokens as kl_cov_tokens
from rl.objectives.losses.ppo import ppo
from tests.each import each

CLIPS = dict(clip_low=0.2, clip_high=0.3)
BOUNDS = dict(cov_low=0.5, cov_high=3.0)
OPTIONS = {clip_cov: CLIPS, kl_cov: {"kl_cov_coef": 0.7}}
both = pytest.mark.parametrize("loss", OPTIONS, ids=lambda loss: loss.__name__)


def batch(seed, size=400):
    """logprobs, old_logprobs, advantages, mask, chosen as tensors, float64 and bool."""
    rng = np.random.default_rng(seed)
    old = rng.normal(-2, 1, size)
    logprobs = old + rng.normal(0, 0.3, size)
    logprobs[:2] = old[:2] + [25.0, -25.0]
    arrays = logprobs, old, rng.normal(size=size), rng.random(size) > 0.2, rng.random(size) > 0.7
    return [torch.tensor(array) for array in arrays]


def covariances(logprobs, advantages, mask):
    """Token by token, float64; NaN at masked positions."""
    kept = [t for t in range(len(mask)) if mask[t]]
    mean_logprob = math.fsum(logprobs[t] for t in kept) / len(kept)
    mean_advantage = math.fsum(advantages[t] for t in kept) / len(kept)
    return [
        (logprobs[t] - mean_logprob) * (advantages[t] - mean_advantage) if mask[t] else math.nan
        for t in range(len(mask))
    ]


def eligible(logprobs, old, advantages, mask, clip_low, clip_high, cov_low, cov_high):
    cov = covariances(logprobs, advantages, mask)
    found = set()
    for t in range(len(mask)):
        ratio = math.exp(min(max(logprobs[t] - old[t], -20), 20)) if mask[t] else 1
        cut = ratio > 1 + clip_high if advantages[t] > 0 else ratio < 1 - clip_low and advantages[t] < 0
        if mask[t] and not cut and cov_low <= cov[t] <= cov_high:
            found.add(t)
    return found


def chosen_set(chosen):
    return set(torch.nonzero(chosen).squeeze(1).tolist())


@each("fraction", [1e-6, 0.03, 0.1, 1.0])
@each("seed", range(3))
def test_clip_cov_selects_the_quota_among_eligible_tokens(seed, fraction):
    arguments = batch(seed)[:4]
    candidates = eligible(*(x.tolist() for x in arguments), **CLIPS, **BOUNDS)
    chosen = clip_cov_tokens(*arguments, **CLIPS, **BOUNDS, cov_fraction=fraction, seed=7)
    assert chosen.dtype == torch.bool and chosen_set(chosen) <= candidates and len(candidates) > 20
    assert len(chosen_set(chosen)) == min(max(1, int(fraction * int(arguments[3].sum()))), len(candidates))


def test_clip_cov_selection_is_seeded_and_uniform():
    arguments = batch(0, size=60)[:4]
    candidates = eligible(*(x.tolist() for x in arguments), **CLIPS, **BOUNDS)
    options = CLIPS | BOUNDS | {"cov_fraction": 1e-6}
    times = dict.fromkeys(candidates, 0)
    for seed in range(400):
        (token,) = chosen_set(clip_cov_tokens(*arguments, **options, seed=seed))
        assert {token} == chosen_set(clip_cov_tokens(*arguments, **options, seed=seed))
        times[token] += 1
    expected = 400 / len(candidates)
    assert len(candidates) >= 4
    assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in times.values())


def test_clip_cov_hand_numbers():
    # Means -2 and 0, so cov = -3, 3, 0, -1, 1; the second is cut by PPO's clip, the last stands on its bound.
    logprobs, advantages = (
        torch.tensor([-3.0, -1.0, -2.0, -1.0, -3.0]),
        torch.tensor([3.0, 3.0, -4.0, -1.0, -1.0]),
    )
    old = logprobs.clone()
    options = CLIPS | dict(cov_low=1.0, cov_high=5.0, cov_fraction=1.0, seed=0)
    assert chosen_set(clip_cov_tokens(logprobs, old, advantages, torch.ones(5), **options)) == {1, 4}
    old[1] -= math.log(2.0)
    assert chosen_set(clip_cov_tokens(logprobs, old, advantages, torch.ones(5), **options)) == {4}
    assert not clip_cov_tokens(logprobs, old, advantages, torch.ones(5), **options | dict(cov_low=1.01)).any()


@each("fraction", [1e-6, 0.03, 0.2, 1.0])
@each("seed", range(3))
def test_kl_cov_chooses_the_greatest_covariances(seed, fraction):
    logprobs, _, advantages, mask, _ = batch(seed)
    cov = covariances(*(x.tolist() for x in (logprobs, advantages, mask)))
    ranked = sorted((t for t in range(len(cov)) if mask[t]), key=lambda t: -cov[t])
    quota = max(1, int(fraction * len(ranked)))
    chosen = kl_cov_tokens(logprobs, advantages, mask, cov_fraction=fraction)
    assert chosen.dtype == torch.bool and chosen_set(chosen) == set(ranked[:quota])


def test_kl_cov_breaks_ties_by_position():
    logprobs = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, -1.0])
    chosen = kl_cov_tokens(logprobs, logprobs, torch.ones(6), cov_fraction=0.5)
    assert chosen.tolist() == [True, True, True, False, False, False]


@each("bad", [float("nan"), float("inf")])
def test_choice_ignores_what_masked_positions_hold(bad):
    logprobs, old, advantages, mask, _ = batch(1)
    dirty = [torch.where(mask, x, bad) for x in (logprobs, old, advantages)]
    options = CLIPS | BOUNDS | dict(cov_fraction=0.05, seed=3)
    clean = clip_cov_tokens(logprobs, old, advantages, mask, **options)
    assert torch.equal(clip_cov_tokens(*dirty, mask.double(), **options), clean) and clean.any()
    clean = kl_cov_tokens(logprobs, advantages, mask, cov_fraction=0.05)
    assert (
        torch.equal(kl_cov_tokens(dirty[0], dirty[2], mask.double(), cov_fraction=0.05), clean)
        and clean.any()
    )


@each("size", [0, 3])
def test_choice_among_no_unmasked_token_is_empty(size):
    empty = torch.full((size,), float("nan"))
    mask = torch.zeros(size)
    options = CLIPS | BOUNDS | dict(cov_fraction=0.5, seed=0)
    assert clip_cov_tokens(empty, empty, empty, mask, **options).tolist() == [False] * size
    assert kl_cov_tokens(empty, empty, mask, cov_fraction=0.5).tolist() == [False] * size


@each("fraction", [0.0, -0.1, 1.5, float("nan")])
def test_fractions_outside_of_one_are_refused(fraction):
    with pytest.raises(ValueError, match="fraction"):
        kl_cov_tokens(*[torch.ones(2)] * 3, cov_fraction=fraction)
    with pytest.raises(ValueError, match="fraction"):
        clip_cov_tokens(*[torch.ones(2)] * 4, **CLIPS, **BOUNDS, cov_fraction=fraction, seed=0)


def reference_clip_cov(logprob, old, advantage, chosen, clip_low, clip_high):
    if chosen:
        return 0.0, 0.0
    log_ratio = min(max(logprob - old, -20.0), 20.0)
    ratio = math.exp(log_ratio)
    if advantage > 0 and ratio > 1 + clip_high:
        return -advantage * (1 + clip_high), 0.0
    if advantage < 0 and ratio < 1 - clip_low:
        return -advantage * (1 - clip_low), 0.0
    return -advantage * ratio, 0.0 if abs(logprob - old) > 20 else -advantage * ratio


def reference_kl_cov(logprob, old, advantage, chosen, kl_cov_coef):
    log_ratio = min(max(logprob - old, -20.0), 20.0)
    value = slope = -advantage * math.exp(log_ratio)
    if chosen:
        value, slope = value + kl_cov_coef * abs(log_ratio), slope + kl_cov_coef * np.sign(log_ratio)
    return value, 0.0 if abs(logprob - old) > 20 else slope


REFERENCES = {clip_cov: reference_clip_cov, kl_cov: reference_kl_cov}


@both
@each("seed", range(3))
def test_loss_gradient_and_statistics_against_the_reference(seed, loss):
    logprobs, old, advantages, mask, chosen = batch(seed)
    leaf = logprobs.clone().requires_grad_()
    token_loss, stats = loss(leaf, old, advantages, mask, chosen, **OPTIONS[loss])
    (grad,) = torch.autograd.grad(token_loss.sum(), leaf)
    rows = zip(*(x.tolist() for x in (logprobs, old, advantages, chosen, mask)))
    expected = np.array([REFERENCES[loss](*row, **OPTIONS[loss]) if m else (0.0, 0.0) for *row, m in rows])
    np.testing.assert_allclose(token_loss.detach(), expected[:, 0], rtol=1e-12)
    np.testing.assert_allclose(grad, expected[:, 1], rtol=1e-12)
    assert stats["pg_covfrac"].item() == (chosen & mask).sum()
    assert stats["ppo_kl"].item() == pytest.approx(
        (old - logprobs).clamp(-20, 20)[mask].sum().item(), rel=1e-12
    )
    assert not any(value.requires_grad or value.dim() for value in stats.values())


def test_clip_cov_without_a_choice_is_ppo():
    logprobs, old, advantages, mask, _ = batch(2)
    token_loss, stats = clip_cov(logprobs, old, advantages, mask, torch.zeros(len(mask)), **CLIPS)
    expected, expected_stats = ppo(logprobs, old, advantages, mask, **CLIPS, dual_clip=0.0)
    assert torch.equal(token_loss, expected)
    assert stats == expected_stats | {"pg_covfrac": torch.tensor(0.0, dtype=torch.float64)}


def test_kl_cov_hand_numbers():
    leaf = torch.tensor([math.log(2.0), math.log(2.0), -1.0], requires_grad=True)
    arguments = torch.zeros(3), torch.tensor([1.0, 1.0, 0.0]), torch.ones(3), torch.tensor([0.0, 1.0, 1.0])
    token_loss, _ = kl_cov(leaf, *arguments, kl_cov_coef=3.0)
    assert token_loss.tolist() == pytest.approx([-2.0, -2.0 + 3 * math.log(2), 3.0])
    assert torch.autograd.grad(token_loss.sum(), leaf)[0].tolist() == pytest.approx([-2.0, 1.0, -3.0])
