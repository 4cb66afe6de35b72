import math
from functools import partial

import numpy as np
import pytest
import torch

from rl.algorithms import dpo, kto, orpo, prime, simpo, sppo
from rl.config.schema import load_config
from rl.data.batch import Batch
from rl.objectives.preference import (
    counted,
    kto_loss,
    log_ratios,
    mean_logprobs,
    mismatch_kl,
    orpo_loss,
    outcome_loss,
    pair_loss,
    sppo_loss,
    win_rates,
)
from rl.phases.minibatches import MinibatchPlan
from rl.training.packing import pack
from tests.each import each

NAN = float("nan")
PAIR_LOSSES = [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)]
pair_losses = pytest.mark.parametrize(
    "loss, smoothing", PAIR_LOSSES, ids=["sigmoid", "smoothed", "hinge", "ipo"]
)


# ------------------------------------------------------------------- second implementation: one at a time,
# python's floats


def log1pexp(x):
    """log(1 + e^x)."""
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def ref_log_ratios(logprobs, ref_logprobs, mask, lengths):
    out, start = [], 0
    for length in lengths:
        out.append(math.fsum(logprobs[t] - ref_logprobs[t] for t in range(start, start + length) if mask[t]))
        start += length
    return out


def ref_pair_loss(chosen, rejected, beta, loss, s):
    """Loss of one pair and its slope for the margin."""
    m = chosen - rejected
    if loss == "sigmoid":
        value = (1 - s) * log1pexp(-beta * m) + s * log1pexp(beta * m)
        return value, -(1 - s) * beta * sigmoid(-beta * m) + s * beta * sigmoid(beta * m)
    if loss == "hinge":
        return (1 - beta * m, -beta) if beta * m < 1 else (0.0, 0.0)
    return (m - 0.5 / beta) ** 2, 2 * (m - 0.5 / beta)


def ref_win_rates(scores, groups):
    rates = []
    for i in range(len(scores)):
        others = [j for j in range(len(scores)) if groups[j] == groups[i] and j != i]
        wins = sum(1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0 for j in others)
        rates.append(wins / len(others) if others else 0.5)
    return rates


def batch(seed, num_samples=12):
    """logprobs, ref_logprobs, mask float64 [T] and lengths; empty, one-token and wholly masked responses
    among them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 20, num_samples)
    lengths[[0, 5]], lengths[[3, num_samples - 1]] = 0, 1
    logprobs, ref = -rng.gamma(2.0, 1.0, (2, lengths.sum()))
    mask = (rng.random(lengths.sum()) > 0.25).astype(float)
    start = lengths[:7].sum()
    mask[start : start + lengths[7]] = 0
    return logprobs, ref, mask, lengths


# Log-ratios
# -----------------------------------------------------------------------------------------------------------


def test_log_ratio_is_the_sum_over_unmasked_tokens_by_hand():
    logprobs, ref = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-1.5, -1.0, -9.0, -4.5])
    ratios = log_ratios(logprobs, ref, torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([2, 0, 2]))
    assert ratios.tolist() == [-0.5, 0.0, 0.5]


@each("seed", range(3))
def test_log_ratios_and_their_gradient_against_the_loop(seed):
    logprobs, ref, mask, lengths = batch(seed)
    leaf = torch.tensor(logprobs, requires_grad=True)
    ratios = log_ratios(leaf, torch.tensor(ref), torch.tensor(mask), torch.tensor(lengths))
    np.testing.assert_allclose(
        ratios.detach(), ref_log_ratios(logprobs, ref, mask, lengths), rtol=1e-12, atol=1e-12
    )
    weights = torch.arange(1.0, len(lengths) + 1, dtype=torch.float64)
    (grad,) = torch.autograd.grad(ratios @ weights, leaf)
    np.testing.assert_array_equal(grad, mask * np.repeat(weights.numpy(), lengths))


@each("bad", [NAN, float("inf"), -float("inf")])
@each("as_float", [True, False])
def test_masked_positions_never_reach_value_or_gradient(bad, as_float):
    logprobs, ref, mask, lengths = (torch.tensor(x) for x in batch(4))
    clean = log_ratios(logprobs, ref, mask, lengths)
    for dirty in ((True, False), (False, True), (True, True)):
        new, old = (
            x.masked_fill(mask == 0, bad) if dirt else x.clone() for x, dirt in zip((logprobs, ref), dirty)
        )
        ratios = log_ratios(new.requires_grad_(), old, mask if as_float else mask.bool(), lengths)
        assert torch.equal(ratios, clean)
        (grad,) = torch.autograd.grad(pair_loss(ratios, beta=0.3, loss="ipo")[0].sum(), new)
        assert grad.isfinite().all() and not grad[mask == 0].any() and grad[mask > 0].any()


def test_empty_and_wholly_masked_responses_have_log_ratio_0():
    logprobs, ref, mask, lengths = (torch.tensor(x) for x in batch(0))
    ratios = log_ratios(logprobs, ref, mask, lengths)
    assert ratios[[0, 5, 7]].tolist() == [0.0, 0.0, 0.0] and ratios.count_nonzero() >= 6


# Samples without a token that counts ------------------------------------------------------------------------


def test_counted_by_hand():
    mask, lengths = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([2, 2, 0, 1, 1, 0])
    assert counted(mask, lengths).tolist() == [True, False, False, True, True, False]
    assert counted(mask.bool(), lengths, unit=2).tolist() == [False] * 6
    assert counted(mask, torch.tensor([1, 0, 3, 0, 1, 1]), unit=2).tolist() == [False] * 4 + [True] * 2
    assert counted(torch.zeros(0), torch.zeros(0, dtype=torch.int64), unit=2).tolist() == []


def preference_batch(unit):
    """Eight samples; of 1 and 4 the mask drops every token, 5 is empty."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 4, 2, 5, 3, 0, 6, 1]
    batch = Batch(
        prompt_ids=[np.ones(2, np.int32)] * 8,
        response_ids=[np.ones(length, np.int32) for length in lengths],
        groups=torch.arange(8) // 2,
        truncated=torch.zeros(8, dtype=torch.bool),
        samples_per_unit=unit,
    )
    batch.mask[3:7], batch.mask[14:17], batch.mask[8] = 0.0, 0.0, 0.0
    names = ("old_logprobs", "ref_logprobs", "implicit_ref_logprobs")
    batch = batch.with_columns({name: -2 + torch.randn(24, generator=generator) for name in names})
    batch.extra["labels"] = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    return batch


LOSSES = {
    "prime": (prime.reward_loss, 1, [0, 2, 3, 6, 7]),
    "sppo": (sppo.loss, 1, [0, 2, 3, 6, 7]),
    "dpo": (dpo.loss, 2, [2, 3, 6, 7]),
    "orpo": (orpo.loss, 2, [2, 3, 6, 7]),
    "simpo": (simpo.loss, 2, [2, 3, 6, 7]),
    "kto": (partial(kto.loss, kl=0.3), 1, [0, 2, 3, 6, 7]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_samples_without_a_counted_token_enter_nothing(name):
    loss, unit, kept = LOSSES[name]
    config = load_config(None, [f"algorithm={name}", "model.path=toy", "data.train=toy.jsonl"])

    def outcome(batch, logprobs):
        everything = list(range(len(batch)))
        micro = pack(batch, everything, multiple=1, device=torch.device("cpu"))
        micro.outputs["logprobs"] = logprobs.clone().requires_grad_()
        value, metrics = loss(micro, MinibatchPlan([[everything]]).totals(batch), config=config)
        value.backward()
        return {key: float(metric.detach()) for key, metric in metrics.items()}, micro.logprobs.grad

    whole = preference_batch(unit)
    entering = torch.repeat_interleave(torch.isin(torch.arange(8), torch.tensor(kept)), whole.lengths)
    logprobs = -2 + torch.randn(24, generator=torch.Generator().manual_seed(1))
    found, gradient = outcome(whole, logprobs)
    expected, expected_gradient = outcome(whole.select(kept), logprobs[entering])
    assert found == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient[entering], expected_gradient)
    assert not gradient[~entering].any() and expected_gradient.any()
    for key, value in found.items():
        assert not key.endswith("accuracy") or 0 <= value <= 1, key


def test_a_batch_in_which_no_token_counts_has_loss_0():
    for name, (loss, unit, _) in LOSSES.items():
        config = load_config(None, [f"algorithm={name}", "model.path=toy", "data.train=toy.jsonl"])
        batch = preference_batch(unit)
        batch.mask = torch.zeros(24)
        micro = pack(batch, list(range(8)), multiple=1, device=torch.device("cpu"))
        micro.outputs["logprobs"] = torch.zeros(24, requires_grad=True)
        value, metrics = loss(micro, MinibatchPlan([[list(range(8))]]).totals(batch), config=config)
        value.backward()
        assert [float(metric.detach()) for metric in metrics.values()] == [0.0] * len(metrics), name
        assert not micro.logprobs.grad.any()


# Pairs ------------------------------------------------------------------------------------------------------


@each(
    "loss, smoothing, margin, value, slope",
    [
        ("sigmoid", 0.0, 0.0, math.log(2), -0.25),
        ("sigmoid", 0.0, math.log(9), math.log(4 / 3), -0.125),  # sigmoid(0.5 log 9) = 3/4
        (
            "sigmoid",
            0.25,
            math.log(9),
            0.75 * math.log(4 / 3) + 0.25 * math.log(4),
            0.0,
        ),  # as sure as it may be
        ("hinge", 0.0, 1.0, 0.5, -0.5),
        ("hinge", 0.0, 3.0, 0.0, 0.0),
        ("ipo", 0.0, 1.0, 0.0, 0.0),  # 1 / (2 beta) is wanted
        ("ipo", 0.0, -1.0, 4.0, -4.0),
    ],
)
def test_pair_losses_by_hand(loss, smoothing, margin, value, slope):
    ratios = torch.tensor([margin + 0.25, 0.25], dtype=torch.float64, requires_grad=True)
    result, stats = pair_loss(ratios, beta=0.5, loss=loss, label_smoothing=smoothing)
    (grad,) = torch.autograd.grad(result.sum(), ratios)
    assert result.tolist() == pytest.approx([value]) and grad.tolist() == pytest.approx([slope, -slope])
    assert {name: float(stat) for name, stat in stats.items()} == pytest.approx(
        {
            "accuracy": float(margin > 0),
            "margin": 0.5 * margin,
            "chosen_reward": 0.5 * margin + 0.125,
            "rejected_reward": 0.125,
        }
    )


def test_simpo_by_hand():
    # beta (-1 - -2) - gamma = 2 - 1 for the first pair, 2 (-1.5 + 1) - 1 = -2 for the second.
    means = torch.tensor([-1.0, -2.0, -1.5, -1.0], dtype=torch.float64, requires_grad=True)
    value, stats = pair_loss(means, beta=2.0, loss="sigmoid", gamma=1.0)
    (grad,) = torch.autograd.grad(value.sum(), means)
    assert value.tolist() == pytest.approx([log1pexp(-1), log1pexp(2)])
    slopes = [-2 * sigmoid(-1), -2 * sigmoid(2)]
    assert grad.tolist() == pytest.approx([slopes[0], -slopes[0], slopes[1], -slopes[1]])
    assert (float(stats["accuracy"]), float(stats["margin"])) == (1.0, 1.0)


def test_mean_logprobs_by_hand():
    logprobs, mask = torch.tensor([-1.0, NAN, -3.0, -5.0]), torch.tensor([1, 0, 1, 0])
    assert mean_logprobs(logprobs, mask, torch.tensor([3, 0, 1])).tolist() == [-2.0, 0.0, 0.0]


def test_orpo_by_hand():
    # P = 0.5 and 0.2: odds 1 and 1/4, ratio 4.
    means = torch.log(torch.tensor([0.5, 0.2], dtype=torch.float64)).requires_grad_()
    value, stats = orpo_loss(means, beta=0.1)
    assert value.tolist() == pytest.approx([math.log(2) + 0.1 * math.log(5 / 4)])  # sigmoid(log 4) = 4/5
    expected = {"accuracy": 1.0, "nll": math.log(2), "log_odds_ratio": math.log(4)}
    assert {name: float(stat) for name, stat in stats.items()} == pytest.approx(expected)
    (grad,) = torch.autograd.grad(value.sum(), means)
    # d log odds / d log P = 1 / (1 - P)
    assert grad.tolist() == pytest.approx([-1 - 0.1 * 0.2 * 2, 0.1 * 0.2 / 0.8])


def test_orpo_against_finite_differences_and_near_certainty():
    means = -torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4 - 0.01
    assert torch.autograd.gradcheck(lambda x: orpo_loss(x, beta=0.3)[0], means.requires_grad_())
    certain = torch.tensor([0.0, -1e-9, -50.0, -1.0], requires_grad=True)
    value, _ = orpo_loss(certain, beta=0.1)
    assert value.isfinite().all() and torch.autograd.grad(value.sum(), certain)[0].isfinite().all()


def test_kto_by_hand():
    ratios = torch.tensor([1.0, -1.0, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    weights = dict(desirable_weight=1.0, undesirable_weight=3.0)
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0])
    value, margin = kto_loss(ratios, labels, beta=2.0, kl=0.5, **weights)
    logits = [1.0, 3.0, 0.0, 0.0]  # beta times (ratio - kl), or (kl - ratio)
    assert margin.tolist() == pytest.approx(logits) and not margin.requires_grad
    scale = [1.0, 3.0, 1.0, 3.0]
    assert value.tolist() == pytest.approx([w * (1 - sigmoid(x)) for w, x in zip(scale, logits)])
    (grad,) = torch.autograd.grad(value.sum(), ratios)
    slopes = [2 * w * sigmoid(x) * sigmoid(-x) for w, x in zip(scale, logits)]
    assert grad.tolist() == pytest.approx([-slopes[0], slopes[1], -slopes[2], slopes[3]])


def test_mismatch_kl_is_a_mean_that_is_not_negative():
    logprobs, ref = torch.tensor([-1.0, -2.0, NAN, -1.0]), torch.tensor([-2.0, -2.5, 0.0, -1.5])
    mask, lengths = torch.tensor([1, 1, 0, 1]), torch.tensor([2, 0, 1, 1])
    assert mismatch_kl(logprobs, ref, mask, lengths) == pytest.approx((1.5 + 0.5) / 2)
    assert mismatch_kl(ref, logprobs, mask, lengths) == 0.0
    assert mismatch_kl(logprobs, ref, torch.zeros(4), lengths) == 0.0


@pair_losses
@each("beta", [0.05, 1.0])
def test_pair_losses_gradients_and_statistics_against_the_loop(loss, smoothing, beta):
    ratios = np.random.default_rng(7).normal(0, 2, 40)
    leaf = torch.tensor(ratios, requires_grad=True)
    value, stats = pair_loss(leaf, beta=beta, loss=loss, label_smoothing=smoothing)
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    expected = [ref_pair_loss(c, r, beta, loss, smoothing) for c, r in ratios.reshape(-1, 2)]
    np.testing.assert_allclose(value.detach(), [v for v, _ in expected], rtol=1e-12)
    np.testing.assert_allclose(
        grad, [sign * slope for _, slope in expected for sign in (1, -1)], rtol=1e-12, atol=1e-15
    )
    chosen, rejected = ratios[::2], ratios[1::2]
    assert {name: stat.item() for name, stat in stats.items()} == pytest.approx(
        {
            "accuracy": int((chosen > rejected).sum()),
            "margin": beta * (chosen - rejected).sum(),
            "chosen_reward": beta * chosen.sum(),
            "rejected_reward": beta * rejected.sum(),
        }
    )
    assert 0 < stats["accuracy"] < 20 and not any(stat.requires_grad for stat in stats.values())


@each("dtype", [torch.float32, torch.float64])
@pair_losses
@each("margin", [1e4, -1e4])
def test_extreme_margins_have_finite_values_and_gradients(loss, smoothing, margin, dtype):
    ratios = torch.tensor([margin / 2, -margin / 2], dtype=dtype, requires_grad=True)
    value, stats = pair_loss(ratios, beta=1.0, loss=loss, label_smoothing=smoothing)
    (grad,) = torch.autograd.grad(value.sum(), ratios)
    expected, slope = ref_pair_loss(margin / 2, -margin / 2, 1.0, loss, smoothing)
    assert value.dtype == grad.dtype == dtype and all(stat.dtype == dtype for stat in stats.values())
    assert value.item() == pytest.approx(expected) and grad.tolist() == pytest.approx([slope, -slope])


@pair_losses
def test_no_pair_and_a_pair_of_empty_responses(loss, smoothing):
    leaf = torch.zeros(0, requires_grad=True)
    for lengths, pairs in ((torch.zeros(0, dtype=torch.int64), 0), (torch.tensor([0, 0]), 1)):
        ratios = log_ratios(leaf, torch.zeros(0), torch.zeros(0), lengths)
        value, stats = pair_loss(ratios, beta=0.5, loss=loss, label_smoothing=smoothing)
        value.sum().backward()  # as of an empty micro-batch
        assert value.tolist() == pytest.approx([ref_pair_loss(0, 0, 0.5, loss, smoothing)[0]] * pairs)
        assert all(stat.item() == 0 for stat in stats.values())


def test_equal_log_ratios_count_as_wrong():
    assert pair_loss(torch.tensor([2.0, 2.0, 3.0, 2.0]), beta=1.0, loss="sigmoid")[1]["accuracy"] == 1


def test_an_unknown_pair_loss_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'logistic' is not one of sigmoid, hinge, ipo"):
        pair_loss(torch.zeros(2), beta=0.1, loss="logistic")


# SPPO -------------------------------------------------------------------------------------------------------


def test_sppo_by_hand():
    ratios = torch.tensor([0.0, 5.0, -5.0, 1.0], requires_grad=True)
    loss = sppo_loss(ratios, torch.tensor([0.5, 1.0, 0.0, 0.25]), eta=10.0)
    assert loss.tolist() == [0.0, 0.0, 0.0, 3.5**2]  # log-ratios of eta (rate - 1/2) are what is aimed at
    assert torch.autograd.grad(loss.sum(), ratios)[0].tolist() == [0.0, 0.0, 0.0, 7.0]


# Win rates --------------------------------------------------------------------------------------------------


def test_win_rates_by_hand():
    scores = torch.tensor([1.0, 0.0, 0.0, 3.0, 7.0, 2.0, 2.0])
    groups = torch.tensor([4, 4, 4, 4, 9, 1, 1])
    assert win_rates(scores, groups).tolist() == pytest.approx([2 / 3, 0.5 / 3, 0.5 / 3, 1.0, 0.5, 0.5, 0.5])


@each("dtype", [torch.float32, torch.float64])
@each("seed", range(5))
def test_win_rates_against_brute_force(seed, dtype):
    rng = np.random.default_rng(seed)
    scores, groups = (
        rng.integers(0, 4, 50) / 3,
        rng.choice([7, -2, 3, 100, 11, 5], 50, p=[0.4, 0.3, 0.15, 0.1, 0.03, 0.02]),
    )
    rates = win_rates(torch.tensor(scores, dtype=dtype), torch.tensor(groups))
    assert rates.dtype == dtype
    np.testing.assert_allclose(rates, ref_win_rates(scores, groups), rtol=1e-6)


def test_win_rates_of_trivial_groups():
    assert win_rates(torch.tensor([-3.0]), torch.tensor([8])).tolist() == [0.5]
    assert win_rates(torch.full((5,), 0.1), torch.zeros(5, dtype=torch.int64)).tolist() == [0.5] * 5
    assert win_rates(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_win_rates_have_no_graph_and_leave_the_scores_alone():
    scores = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not win_rates(scores, torch.zeros(2, dtype=torch.int64)).requires_grad
    assert scores.tolist() == [1.0, 2.0]


# The implicit reward model ----------------------------------------------------------------------------------


@each(
    "ratio, label, value, slope",
    [
        (0.0, 1.0, math.log(2), -0.25),
        (math.log(9), 1.0, math.log(4 / 3), -0.125),
        (math.log(9), 0.0, math.log(4), 0.375),
        (math.log(9), 0.75, 0.75 * math.log(4 / 3) + 0.25 * math.log(4), 0.0),
    ],
)
def test_outcome_loss_by_hand(ratio, label, value, slope):
    leaf = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    loss, _ = outcome_loss(leaf, torch.tensor([label], dtype=torch.float64), beta=0.5)
    assert loss.tolist() == pytest.approx([value])
    assert torch.autograd.grad(loss.sum(), leaf)[0].tolist() == pytest.approx([slope])


def test_outcome_loss_against_the_loop_and_finite_differences():
    rng = np.random.default_rng(3)
    ratios, labels = (
        rng.normal(0, 20, 40),
        np.where(rng.random(40) < 0.5, rng.integers(0, 2, 40), rng.random(40)),
    )
    leaf, aims = torch.tensor(ratios, requires_grad=True), torch.tensor(labels)
    loss, stats = outcome_loss(leaf, aims, beta=0.05)
    expected = [y * log1pexp(-0.05 * r) + (1 - y) * log1pexp(0.05 * r) for r, y in zip(ratios, labels)]
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-12)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    np.testing.assert_allclose(
        grad, [0.05 * (sigmoid(0.05 * r) - y) for r, y in zip(ratios, labels)], rtol=1e-12
    )
    assert stats["accuracy"].item() == sum((r > 0) == (y > 0.5) for r, y in zip(ratios, labels))
    assert 0 < stats["accuracy"] < 40 and not stats["accuracy"].requires_grad


@each("label", [0.0, 1.0])
@each("ratio", [1e4, -1e4])
def test_outcome_loss_of_an_extreme_log_ratio_is_finite(ratio, label):
    leaf = torch.tensor([ratio], requires_grad=True)
    loss, stats = outcome_loss(leaf, torch.tensor([label]), beta=1.0)
    loss.sum().backward()
    right = (ratio > 0) == (label == 1)
    assert loss.item() == pytest.approx(0.0 if right else 1e4)
    assert (
        leaf.grad.item() == pytest.approx(0.0 if right else math.copysign(1, ratio))
        and stats["accuracy"] == right
    )


def test_outcome_loss_of_no_sample_keeps_its_graph():
    leaf = torch.zeros(0, requires_grad=True)
    loss, stats = outcome_loss(leaf, torch.zeros(0), beta=1.0)
    loss.sum().backward()
    assert loss.shape == leaf.grad.shape == (0,) and stats["accuracy"] == 0
