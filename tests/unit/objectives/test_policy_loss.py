import math

import numpy as np
import pytest
import torch

from rl.objectives.losses.cispo import cispo
from rl.objectives.losses.dppo_kl import dppo_kl
from rl.objectives.losses.dppo_tv import dppo_tv
from rl.objectives.losses.dro import dro
from rl.objectives.losses.gpg import gpg
from rl.objectives.losses.ppo import ppo
from rl.objectives.losses.reinforce import reinforce
from rl.objectives.losses.sapo import sapo
from tests.each import each

CLIPS = [
    dict(clip_low=0.2, clip_high=0.2, dual_clip=0.0),
    dict(clip_low=0.2, clip_high=0.28, dual_clip=0.0),
    dict(clip_low=0.1, clip_high=0.3, dual_clip=1.5),
]


def reference(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip):
    """Token by token, float64, by cases instead of min and max. Returns loss, gradient for logprobs,
    statistics."""
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
    """logprobs, old_logprobs, advantages, mask as float64 arrays; a spread of ratios, some zero advantages
    and masks."""
    rng = np.random.default_rng(seed)
    old = rng.normal(-2, 1, size)
    logprobs = old + rng.normal(0, 0.5, size)
    logprobs[:4] = old[:4] + [25.0, -25.0, 25.0, -25.0]
    advantages = rng.normal(size=size) * (rng.random(size) > 0.1)
    return logprobs, old, advantages, rng.random(size) > 0.2


def tensors(*arrays):
    return [torch.tensor(array) for array in arrays]


@each(
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


@each("clips", CLIPS)
@each("seed", range(3))
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
    assert expected_stats["pg_clipfrac"] > 0 and (
        not clips["dual_clip"] or expected_stats["pg_clipfrac_lower"] > 0
    )


def test_log_ratio_is_clamped_before_exp():
    advantages = torch.tensor([-1.0, -1.0])
    logprobs = torch.tensor([200.0, -200.0], requires_grad=True)
    token_loss, stats = ppo(logprobs, torch.zeros(2), advantages, torch.ones(2), **CLIPS[0])
    assert token_loss.tolist() == pytest.approx([math.exp(20.0), 0.8])
    assert torch.autograd.grad(token_loss.sum(), logprobs)[0].tolist() == [0.0, 0.0]


@each("dual_clip", [1.0, 0.5, -3.0])
def test_dual_clip_that_would_undo_the_clip_is_refused(dual_clip):
    with pytest.raises(ValueError, match="dual_clip"):
        ppo(*[torch.zeros(1)] * 4, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)


# The other losses of one token. Each reference returns loss, slope for the log-probability, and what counts
# as clipped.


def ratio_of(logprob, old):
    return math.exp(min(max(logprob - old, -20.0), 20.0))


def reference_reinforce(logprob, old, advantage):
    return -advantage * logprob, -advantage, {}


def reference_cispo(logprob, old, advantage, clip_low, clip_high):
    ratio = ratio_of(logprob, old)
    weight = 1 - clip_low if ratio < 1 - clip_low else 1 + clip_high if ratio > 1 + clip_high else ratio
    return -weight * advantage * logprob, -weight * advantage, {"pg_clipfrac": weight != ratio}


def reference_sapo(logprob, old, advantage, sapo_tau_positive, sapo_tau_negative):
    tau = sapo_tau_positive if advantage > 0 else sapo_tau_negative
    ratio = ratio_of(logprob, old)
    gate = 1 / (1 + math.exp(min(-tau * (ratio - 1), 700.0)))
    slope = 0.0 if abs(logprob - old) > 20 else -advantage * 4 * gate * (1 - gate) * ratio
    return -advantage * 4 / tau * gate, slope, {}


def reference_dro(logprob, old, advantage, dro_beta):
    change = logprob - old
    return -advantage * logprob + dro_beta / 2 * change**2, -advantage + dro_beta * change, {}


def reference_dppo(logprob, old, advantage, outside, max_ratio):
    ratio = ratio_of(logprob, old)
    if outside:
        return 0.0, 0.0, {"pg_clipfrac": 1, "pg_clipfrac_lower": 0}
    weight = min(ratio, max_ratio)
    stats = {"pg_clipfrac": 0, "pg_clipfrac_lower": ratio > max_ratio}
    return -weight * advantage * logprob, -weight * advantage, stats


def reference_dppo_tv(logprob, old, advantage, clip_low, clip_high, dppo_max_ratio):
    rise = math.exp(logprob) - math.exp(old)
    return reference_dppo(
        logprob, old, advantage, rise > clip_high if advantage > 0 else -rise > clip_low, dppo_max_ratio
    )


def reference_dppo_kl(logprob, old, advantage, clip_low, clip_high, dppo_max_ratio):
    p, q = math.exp(logprob), math.exp(old)
    divergence = q * (old - logprob) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    outside = p > q and divergence > clip_high if advantage > 0 else p < q and divergence > clip_low
    return reference_dppo(logprob, old, advantage, outside, dppo_max_ratio)


DPPO = dict(clip_low=0.1, clip_high=0.05, dppo_max_ratio=1.8)
LOSSES = {
    "reinforce": (reinforce, {}, reference_reinforce),
    "gpg": (gpg, {}, reference_reinforce),
    "cispo": (cispo, dict(clip_low=0.3, clip_high=0.2), reference_cispo),
    "cispo-one-sided": (cispo, dict(clip_low=1e6, clip_high=0.2), reference_cispo),
    "sapo": (sapo, dict(sapo_tau_positive=1.0, sapo_tau_negative=1.4), reference_sapo),
    "dro": (dro, dict(dro_beta=0.3), reference_dro),
    "dppo-tv": (dppo_tv, DPPO, reference_dppo_tv),
    "dppo-kl": (dppo_kl, dict(clip_low=0.02, clip_high=0.01, dppo_max_ratio=1.8), reference_dppo_kl),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def probabilities(seed, size=300):
    """As `batch`, but log-probabilities are below 0, near it for most, as a language model's."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, size)
    logprobs = np.minimum(old + rng.normal(0, 0.6, size), -1e-4)
    old[:2], logprobs[:2] = [-30.0, -1.0], [-1.0, -30.0]
    advantages = rng.normal(size=size) * (rng.random(size) > 0.1)
    return logprobs, old, advantages, rng.random(size) > 0.2


@every_loss
@each("seed", range(3))
def test_other_losses_against_their_references(seed, name):
    loss, options, reference = LOSSES[name]
    logprobs, old, advantages, mask = probabilities(seed)
    leaf = torch.tensor(logprobs, requires_grad=True)
    token_loss, stats = loss(leaf, *tensors(old, advantages, mask), **options)
    (grad,) = torch.autograd.grad(token_loss.sum(), leaf)

    expected = [
        reference(*x, **options) if m else (0.0, 0.0, {}) for *x, m in zip(logprobs, old, advantages, mask)
    ]
    np.testing.assert_allclose(
        token_loss.detach(), [value for value, _, _ in expected], rtol=1e-9, atol=1e-15
    )
    np.testing.assert_allclose(grad, [slope for _, slope, _ in expected], rtol=1e-9, atol=1e-15)
    counts = {
        key: sum(counted.get(key, 0) for *_, counted in expected) for key in expected[np.argmax(mask)][2]
    }
    assert stats.keys() == {"ppo_kl"} | counts.keys()
    assert stats["ppo_kl"].item() == pytest.approx(np.clip(old - logprobs, -20, 20)[mask].sum(), rel=1e-12)
    for key, count in counts.items():
        assert stats[key].item() == count > 0
    assert not any(value.requires_grad or value.dim() for value in stats.values())


@each(
    "name, ratio, old_probability, advantage, loss, slope",
    [
        ("reinforce", 2.0, 0.25, 3.0, -3 * math.log(0.5), -3.0),
        ("cispo", 2.0, 0.25, 3.0, -1.2 * 3 * math.log(0.5), -3.6),  # clipped from above, and still a gradient
        ("cispo", 0.5, 0.5, 3.0, -0.7 * 3 * math.log(0.25), -2.1),
        ("cispo-one-sided", 0.5, 0.5, 3.0, -0.5 * 3 * math.log(0.25), -1.5),
        ("sapo", 1.0, 0.5, 3.0, -3 * 2.0, -3.0),
        ("sapo", 1.0, 0.5, -3.0, 3 * 2 / 1.4, 3.0),
        ("dro", 2.0, 0.25, 3.0, -3 * math.log(0.5) + 0.15 * math.log(2) ** 2, -3 + 0.3 * math.log(2)),
        ("dppo-tv", 1.5, 0.02, 1.0, -1.5 * math.log(0.03), -1.5),  # a rare token may move by a half,
        ("dppo-tv", 1.5, 0.6, 1.0, 0.0, 0.0),  # a frequent one may not,
        ("dppo-tv", 1.5, 0.6, -1.0, 1.5 * math.log(0.9), 1.5),  # unless its advantage pulls it back
        ("dppo-tv", 4.0, 0.01, 1.0, -1.8 * math.log(0.04), -1.8),  # truncated
        ("dppo-kl", 0.5, 0.8, -1.0, 0.0, 0.0),  # KL of (0.8, 0.2) from (0.4, 0.6) is 0.33
        ("dppo-kl", 0.5, 0.8, 1.0, -0.5 * math.log(0.4), -0.5),
        (
            "dppo-kl",
            0.99,
            1.0,
            -1.0,
            0.99 * math.log(0.99),
            0.99,
        ),  # no other token had a probability; KL 0.01
    ],
)
def test_other_losses_hand_numbers(name, ratio, old_probability, advantage, loss, slope):
    function, options, _ = LOSSES[name]
    leaf = torch.tensor([math.log(ratio * old_probability)], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([math.log(old_probability)], dtype=torch.float64)
    token_loss, _ = function(
        leaf, old, torch.tensor([advantage], dtype=torch.float64), torch.ones(1), **options
    )
    assert token_loss.item() == pytest.approx(loss, rel=1e-12)
    assert torch.autograd.grad(token_loss.sum(), leaf)[0].item() == pytest.approx(slope, rel=1e-12)


@every_loss
def test_sure_tokens_and_absurd_ratios_stay_finite_in_float32(name):
    loss, options, _ = LOSSES[name]
    leaf = torch.tensor([0.0, -1e-8, -90.0, 0.0, -90.0, -0.5], requires_grad=True)
    old = torch.tensor([0.0, 0.0, 0.0, -90.0, -90.0, 0.0])
    for sign in (1.0, -1.0):
        token_loss, stats = loss(leaf, old, torch.full((6,), sign), torch.ones(6), **options)
        (grad,) = torch.autograd.grad(token_loss.sum(), leaf)
        assert token_loss.isfinite().all() and grad.isfinite().all()
        assert all(value.isfinite() for value in stats.values())


@each(
    "loss, options, message",
    [
        (sapo, dict(sapo_tau_positive=0.0, sapo_tau_negative=1.0), "must be positive"),
        (sapo, dict(sapo_tau_positive=1.0, sapo_tau_negative=-1.0), "must be positive"),
        (dro, dict(dro_beta=0.0), "beta"),
        (dro, dict(dro_beta=float("nan")), "beta"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(loss, options, message):
    with pytest.raises(ValueError, match=message):
        loss(*[torch.zeros(1)] * 4, **options)
