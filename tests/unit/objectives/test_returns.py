import math

import numpy as np
import pytest
import torch

from rl.objectives.advantages.gae import gae
from rl.objectives.advantages.optimal_token_baseline import optimal_token_baseline
from rl.objectives.advantages.prime import prime
from rl.objectives.advantages.reinforce_pp import reinforce_pp
from rl.objectives.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from rl.objectives.returns import place_at_end, returns, whiten
from tests.each import each

NAN = float("nan")

# ------------------------------------------------------- second implementation: sample by sample, token by
# token, float64 A batch `b` is a dict of arrays; `split` gives the unmasked tokens of each sample, `merge` is
# its inverse.


def split(b, column):
    ends = np.cumsum(b["lengths"])
    return [b[column][end - n : end][b["mask"][end - n : end] > 0] for end, n in zip(ends, b["lengths"])]


def merge(b, per_sample):
    out = np.zeros(len(b["mask"]))
    out[b["mask"] > 0] = np.concatenate([np.asarray(x, dtype=np.float64) for x in per_sample])
    return out


def ref_to_go(rewards, gamma):
    return [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


def ref_whiten(b, x, shift_mean=True, eps=1e-8):
    kept = x[b["mask"] > 0]
    out = np.zeros(len(x))
    if len(kept) > 1:
        out[b["mask"] > 0] = (kept - kept.mean()) / math.sqrt(kept.var(ddof=1) + eps) + (
            0 if shift_mean else kept.mean()
        )
    return out


def ref_place_at_end(b):
    out, start = np.zeros(len(b["mask"])), 0
    for score, n in zip(b["scores"], b["lengths"]):
        kept = [t for t in range(start, start + n) if b["mask"][t]]
        if kept:
            out[kept[-1]] = score
        start += n
    return out


def ref_returns(b, gamma):
    return merge(b, [ref_to_go(rewards, gamma) for rewards in split(b, "rewards")])


def ref_prime(b, process_coef, outcome_coef, gamma):
    rewards, advantages = split(b, "rewards"), []
    for i, own in enumerate(rewards):
        others = [j for j in range(len(rewards)) if b["groups"][j] == b["groups"][i] and j != i]
        means = [rewards[j].mean() for j in others if len(rewards[j])]
        centered = own - np.mean(means) if means else 0 * own
        outcome = b["scores"][i] - np.mean(b["scores"][others]) if others else 0.0
        advantages.append([process_coef * g + outcome_coef * outcome for g in ref_to_go(centered, gamma)])
    return ref_whiten(b, merge(b, advantages))


SEGMENTS = ("lengths", "mask")


def cols(b, *names):
    return [b[name] for name in names]


# Each gives one [T] from a batch of tensors.
ESTIMATORS = {
    "place_at_end": lambda b: place_at_end(*cols(b, "scores", *SEGMENTS)),
    "returns": lambda b: returns(*cols(b, "rewards", *SEGMENTS), gamma=0.9),
    "returns_undiscounted": lambda b: returns(*cols(b, "rewards", *SEGMENTS), gamma=1.0),
    "gae_advantages": lambda b: gae(*cols(b, "rewards", "values", *SEGMENTS), gamma=0.95, lam=0.8)[0],
    "gae_vapo": lambda b: gae(*cols(b, "rewards", "values", *SEGMENTS), **VAPO)[0],
    "gae_returns": lambda b: gae(*cols(b, "rewards", "values", *SEGMENTS), gamma=0.95, lam=0.8)[1],
    "whiten": lambda b: whiten(b["rewards"], b["mask"]),
    "whiten_keep_mean": lambda b: whiten(b["rewards"], b["mask"], shift_mean=False, eps=0.3),
    "reinforce_pp": lambda b: reinforce_pp(*cols(b, "rewards", *SEGMENTS), gamma=0.9),
    "reinforce_pp_baseline": lambda b: reinforce_pp_baseline(*cols(b, "scores", "groups", *SEGMENTS)),
    "otb": lambda b: otb(b),
    "otb_weighted": lambda b: otb(b, loss_weights=b["weights"]),
    "otb_with_tail": lambda b: otb(b, zero_tail=False),
    "prime": lambda b: prime(*cols(b, "rewards", "scores", "groups", *SEGMENTS), **PRIME),
}
VAPO = dict(gamma=0.95, lam=1.0, length_adaptive_alpha=0.3)
PRIME = dict(process_coef=5.0, outcome_coef=3.0, gamma=0.97)
REFERENCES = {
    "place_at_end": ref_place_at_end,
    "returns": lambda b: ref_returns(b, 0.9),
    "returns_undiscounted": lambda b: ref_returns(b, 1.0),
    "whiten": lambda b: ref_whiten(b, b["rewards"]),
    "whiten_keep_mean": lambda b: ref_whiten(b, b["rewards"], False, 0.3),
    "reinforce_pp": lambda b: ref_whiten(b, ref_returns(b, 0.9)),
    "prime": lambda b: ref_prime(b, **PRIME),
}
"""Functions of a batch of arrays. tests/unit/checks/test_advantage_checks.py compares the other
estimators with the check's second computation."""
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def otb(b, **options):
    columns = cols(b, "rewards", "groups", *SEGMENTS)
    return optimal_token_baseline(*columns, old_logprobs=b["logprobs"], sum_p_squared=b["squares"], **options)


PER_SAMPLE = ("scores", "groups", "lengths")
PER_TOKEN = ("mask", "rewards", "values", "logprobs", "squares", "weights")


def batch(seed, mask_dtype=np.float64):
    """Ragged, with empty, fully masked and one-token responses, groups of one, holes in the mask and NaN in
    the holes."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(rng.choice(1000, 8, replace=False) - 500, [1, 2, 3, 5, 1, 4, 2, 6])
    lengths = rng.integers(2, 14, len(groups))
    lengths[rng.choice(len(groups), 6, replace=False)] = [0, 0, 0, 1, 1, 1]
    lengths[1:3] = [0, 7]  # a group of two; one is empty
    order = rng.permutation(len(groups))
    groups, lengths = groups[order], lengths[order]
    tokens = lengths.sum()
    mask = (rng.random(tokens) > 0.3).astype(mask_dtype)
    long = int(np.argmax(lengths))
    mask[lengths[:long].sum() : lengths[: long + 1].sum()] = 0
    p = rng.uniform(0.05, 1.0, tokens)
    b = {
        "scores": rng.normal(size=len(groups)),
        "groups": groups,
        "lengths": lengths,
        "mask": mask,
        "rewards": rng.normal(size=tokens),
        "values": rng.normal(size=tokens),
        "logprobs": np.log(p),
        "squares": p**2 + rng.uniform(0, 1, tokens) * (1 - p) ** 2,
        "weights": rng.uniform(0, 2, tokens),
    }
    for name in PER_TOKEN[1:]:
        b[name][mask == 0] = NAN
    return b


def tensors(b, dtype=torch.float64):
    converted = {name: torch.tensor(array) for name, array in b.items()}
    return {
        name: x.to(dtype) if name not in ("groups", "lengths", "mask") else x for name, x in converted.items()
    }


def permuted(b, order):
    """The same samples in another order, and the index that takes tokens there."""
    starts = np.cumsum(b["lengths"]) - b["lengths"]
    tokens = np.concatenate([np.arange(starts[i], starts[i] + b["lengths"][i]) for i in order])
    return {name: b[name][order if name in PER_SAMPLE else tokens] for name in b}, tokens


# ------------------------------------------------------------------------------------------------- every
# estimator


@pytest.mark.parametrize("name", REFERENCES)
@each("mask_dtype", [np.float64, np.bool_])
@each("seed", range(4))
def test_random_ragged_batches_against_the_reference(name, seed, mask_dtype):
    b = batch(seed, mask_dtype)
    expected, actual = REFERENCES[name](b), ESTIMATORS[name](tensors(b))
    assert np.abs(expected).max() > 0.1 and not expected[b["mask"] == 0].any()
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-11)
    assert not actual[torch.tensor(b["mask"]) == 0].any()


@every_estimator
def test_order_of_samples_does_not_matter(name):
    b = batch(7)
    shuffled, tokens = permuted(b, np.random.default_rng(0).permutation(len(b["lengths"])))
    estimate = ESTIMATORS[name]
    torch.testing.assert_close(
        estimate(tensors(b))[tokens], estimate(tensors(shuffled)), rtol=1e-11, atol=1e-12
    )


@every_estimator
@each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_kept_and_no_graph(name, dtype):
    b = tensors(batch(8), dtype)
    for column in ("scores", "rewards", "values", "logprobs"):
        b[column].requires_grad_()
    result = ESTIMATORS[name](b)
    assert result.dtype == dtype and not result.requires_grad and result.shape == b["mask"].shape
    assert result.isfinite().all()


@every_estimator
@each("num_samples", [0, 3])
def test_batch_without_tokens(name, num_samples):
    b = {column: torch.zeros(0) for column in PER_TOKEN}
    b |= {"scores": torch.ones(num_samples), "groups": torch.zeros(num_samples).long()}
    assert ESTIMATORS[name](b | {"lengths": torch.zeros(num_samples).long()}).shape == (0,)


@every_estimator
def test_batch_with_all_tokens_masked(name):
    b = tensors(batch(9))
    b["mask"] = torch.zeros_like(b["mask"])
    assert not ESTIMATORS[name](b).any()


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if not name.startswith("whiten")])
def test_lengths_that_do_not_sum_to_the_tokens_are_refused(name):
    b = tensors(batch(10))
    b["lengths"] = b["lengths"] + 1
    with pytest.raises(RuntimeError):
        ESTIMATORS[name](b)


@pytest.mark.parametrize("name", ["reinforce_pp_baseline", "otb_with_tail", "prime"])
@each("dtype", [torch.float32, torch.float64])
def test_equal_scores_give_exactly_zero(name, dtype):
    b = tensors(batch(11), dtype)
    b["scores"] = torch.full_like(b["scores"], 0.1)
    # For OTB equal rewards to go, for PRIME equal process rewards: a power of two, so that their means are
    # exact.
    at_end = place_at_end(b["scores"], b["lengths"], b["mask"])
    b["rewards"] = at_end if name == "otb_with_tail" else torch.full_like(b["rewards"], 0.125)
    assert not ESTIMATORS[name](b).any()


@each("fraction", [-0.1, 1.1, NAN])
def test_discounts_outside_0_and_1_are_refused(fraction):
    x, lengths, scores = torch.ones(2), torch.tensor([2]), torch.ones(1)
    with pytest.raises(ValueError, match="gamma="):
        returns(x, lengths, x, gamma=fraction)
    with pytest.raises(ValueError, match="gamma="):
        gae(x, x, lengths, x, gamma=fraction, lam=1.0)
    with pytest.raises(ValueError, match="lam="):
        gae(x, x, lengths, x, gamma=1.0, lam=fraction)
    with pytest.raises(ValueError, match="gamma="):
        prime(x, scores, lengths, lengths, x, process_coef=1.0, outcome_coef=1.0, gamma=fraction)


# ---------------------------------------------------------------------------------------------------- hand
# numbers


def test_score_goes_to_the_last_unmasked_token():
    lengths = torch.tensor([3, 0, 2, 1])
    mask = torch.tensor([1, 1, 0, 0, 0, 1])
    rewards = place_at_end(torch.tensor([1.0, 2.0, 3.0, 4.0]), lengths, mask)
    assert rewards.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 4.0]


def test_returns_skip_masked_tokens_without_discounting_them():
    rewards = torch.tensor([1.0, NAN, 2.0, 4.0, 8.0, 16.0])
    mask = torch.tensor([True, False, True, True, True, True])
    # First sample: 4, 2 + 4/2, 1 + 4/2; second: 16, 8 + 16/2.
    to_go = returns(rewards, torch.tensor([4, 2]), mask, gamma=0.5)
    assert to_go.tolist() == [3.0, 0.0, 4.0, 4.0, 16.0, 16.0]
    assert returns(rewards, torch.tensor([4, 2]), mask, gamma=0.0).tolist() == [1.0, 0.0, 2.0, 4.0, 8.0, 16.0]


def test_returns_of_long_responses_of_many_lengths():
    rng = np.random.default_rng(0)
    lengths = np.array([1000, 1, 511, 512, 513, 0, 2, 3])
    rewards = rng.normal(size=lengths.sum())
    expected, start = [], 0
    for n in lengths:
        running, own = 0.0, []
        for r in rewards[start : start + n][::-1]:
            running = r + 0.99 * running
            own.append(running)
        expected += own[::-1]
        start += n
    actual = returns(torch.tensor(rewards), torch.tensor(lengths), torch.ones(len(rewards)), gamma=0.99)
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


def test_nan_of_one_sample_stays_there():
    x, lengths, mask = torch.tensor([1.0, 1.0, NAN, 1.0, 1.0]), torch.tensor([2, 2, 1]), torch.ones(5)
    assert returns(x, lengths, mask, gamma=0.5).isnan().tolist() == [False, False, True, False, False]
    advantages, _ = gae(torch.ones(5), x, lengths, mask, gamma=0.5, lam=0.5)
    assert advantages.isnan().tolist() == [False, False, True, False, False]


def test_gae_hand_numbers_with_a_masked_token_between():
    rewards, values = torch.tensor([0.0, NAN, 1.0]), torch.tensor([0.5, NAN, 0.25])
    advantages, targets = gae(rewards, values, torch.tensor([3]), torch.tensor([1, 0, 1]), gamma=0.5, lam=0.5)
    # Last: 1 - 0.25 = 0.75. First: delta 0 + 0.5 * 0.25 - 0.5 = -0.375, plus 0.25 * 0.75.
    assert advantages.tolist() == [-0.1875, 0.0, 0.75]
    assert targets.tolist() == [0.3125, 0.0, 1.0]


def test_gae_of_vapo_by_hand():
    """A response of two tokens has lam = 1 - 1 / (1 * 2) = 0.5, one of a single token has lam = 0."""
    rewards, values = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.5, 0.25, 1.0])
    columns = rewards, values, torch.tensor([2, 1]), torch.ones(3)
    advantages, targets = gae(*columns, gamma=1.0, lam=0.9, lam_critic=1.0, length_adaptive_alpha=1.0)
    # Errors: -0.25 and 0.75. Advantages: -0.25 + 0.5 * 0.75 and 0.75. Targets: the whole rewards.
    assert advantages.tolist() == [0.125, 0.75, 2.0]
    assert targets.tolist() == [1.0, 1.0, 3.0]
    only_critic = gae(*columns, gamma=1.0, lam=0.0, lam_critic=1.0)
    assert [column.tolist() for column in only_critic] == [[-0.25, 0.75, 2.0], [1.0, 1.0, 3.0]]


def test_gae_with_lambda_1_is_returns_minus_values():
    b = tensors(batch(12))
    advantages, targets = gae(*cols(b, "rewards", "values", *SEGMENTS), gamma=0.9, lam=1.0)
    to_go = returns(*cols(b, "rewards", *SEGMENTS), gamma=0.9)
    torch.testing.assert_close(targets, to_go)
    torch.testing.assert_close(advantages, torch.where(b["mask"] > 0, to_go - b["values"], 0.0))


def test_whiten_hand_numbers():
    x, mask = torch.tensor([1.0, 2.0, 3.0, 100.0]), torch.tensor([1, 1, 1, 0])
    assert whiten(x, mask).tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0])  # unbiased variance 2 / 2
    assert whiten(x, mask, shift_mean=False).tolist() == pytest.approx([1.0, 2.0, 3.0, 0.0])
    assert whiten(x, mask, eps=3.0).tolist() == pytest.approx([-0.5, 0.0, 0.5, 0.0])


@each("shift_mean", [True, False])
def test_whiten_of_no_or_one_token_is_zero(shift_mean):
    x = torch.tensor([5.0, NAN, 7.0])
    assert whiten(x, torch.tensor([0, 0, 0]), shift_mean=shift_mean).tolist() == [0.0, 0.0, 0.0]
    assert whiten(x, torch.tensor([0, 0, 1]), shift_mean=shift_mean).tolist() == [0.0, 0.0, 0.0]


@each("dtype", [torch.float32, torch.float64])
def test_whiten_of_equal_numbers_is_exactly_zero(dtype):
    assert not whiten(torch.full((1001,), 0.1, dtype=dtype), torch.ones(1001)).any()


def test_reinforce_pp_whitens_rewards_to_go():
    # Rewards to go 2, 2, 4 and 0: mean 2, unbiased variance 8 / 3.
    rewards, lengths = torch.tensor([0.0, -2.0, 4.0, 0.0]), torch.tensor([3, 1])
    advantages = reinforce_pp(rewards, lengths, torch.ones(4), gamma=1.0)
    assert advantages.tolist() == pytest.approx(
        [0.0, 0.0, 2 / math.sqrt(8 / 3), -2 / math.sqrt(8 / 3)], abs=1e-6
    )


def test_reinforce_pp_baseline_of_a_group_of_one():
    scores, lengths = torch.tensor([1.0, 0.0, 9.0, 4.0, 4.0]), torch.tensor([3, 1, 1, 1, 1])
    advantages = reinforce_pp_baseline(scores, torch.tensor([0, 0, 1, 2, 2]), lengths, torch.ones(7))
    # Tokens 1/2 three times, -1/2, 0 three times: mean 1/7, unbiased variance (1 - 7/49) / 6 = 1/7.
    root = math.sqrt(7)
    expected = [5 / 14 * root] * 3 + [-9 / 14 * root] + [-root / 7] * 3
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5)


def test_reinforce_pp_baseline_keeps_the_spread_of_each_group():
    scores, groups = torch.tensor([1.0, 0.0, 4.0, 0.0]), torch.tensor([0, 0, 1, 1])
    narrow, _, wide, _ = reinforce_pp_baseline(scores, groups, torch.ones(4).long(), torch.ones(4))
    assert (wide / narrow).item() == pytest.approx(4.0)


def test_optimal_token_baseline_hand_numbers():
    # Two samples with rewards to go (1, 1) and (0): energies 1 - 2p + sum p^2 of 0.5 and 1.5 at the first
    # token.
    rewards, lengths, groups = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([2, 1]), torch.tensor([3, 3])
    probabilities, squares = torch.tensor([0.5, 0.9, 0.1]), torch.tensor([0.5, 0.9, 0.7])
    columns = {"old_logprobs": probabilities.log(), "sum_p_squared": squares}
    advantages = optimal_token_baseline(rewards, groups, lengths, torch.ones(3), **columns)
    # Baseline 0.5 / (0.5 + 1.5) = 0.25 at the first token, 0 at the second, where the first sample is alone.
    assert advantages.tolist() == pytest.approx([0.75, 1.0, -0.25])
    by_formula = optimal_token_baseline(rewards, groups, lengths, torch.ones(3), **columns, zero_tail=False)
    assert by_formula.tolist() == pytest.approx([0.75, 0.0, -0.25])
    # Weights enter squared: baseline 4 * 0.5 / (4 * 0.5 + 1.5) = 4/7.
    weighted = optimal_token_baseline(
        rewards, groups, lengths, torch.ones(3), **columns, loss_weights=torch.tensor([2.0, 1, 1])
    )
    assert weighted.tolist() == pytest.approx([3 / 7, 1.0, -4 / 7])
    alone = optimal_token_baseline(rewards, torch.tensor([3, 4]), lengths, torch.ones(3), **columns)
    assert alone.tolist() == [0.0, 0.0, 0.0]


def test_optimal_token_baseline_of_certain_tokens():
    certain = {"old_logprobs": torch.zeros(2), "sum_p_squared": torch.ones(2) - 1e-7}
    rewards, lengths = torch.tensor([1.0, 0.0]), torch.tensor([1, 1])
    advantages = optimal_token_baseline(rewards, torch.tensor([0, 0]), lengths, torch.ones(2), **certain)
    assert advantages.tolist() == [0.5, -0.5]


def test_optimal_token_baseline_clamps_negative_energies():
    # Energies 2e-7 and -1e-7: as weights of either sign they would put the baseline at 2, outside the rewards
    # 1 and 0.
    nearly_certain = {
        "old_logprobs": torch.zeros(2),
        "sum_p_squared": torch.tensor([1 + 2e-7, 1 - 1e-7], dtype=torch.float64),
    }
    rewards, lengths = torch.tensor([1.0, 0.0]), torch.tensor([1, 1])
    advantages = optimal_token_baseline(
        rewards, torch.tensor([0, 0]), lengths, torch.ones(2), **nearly_certain
    )
    assert advantages.tolist() == [0.0, -1.0]


def test_optimal_token_baseline_minimises_the_variance():
    """The defining property: at each position, moving the baseline either way increases sum(W * A^2)."""
    rng = np.random.default_rng(0)
    p, rewards, lengths = rng.uniform(0.1, 0.9, 12), torch.tensor(rng.normal(size=12)), torch.full((6,), 2)
    squares = p**2 + 0.5 * (1 - p) ** 2
    columns = {"old_logprobs": torch.tensor(p).log(), "sum_p_squared": torch.tensor(squares)}
    advantages = optimal_token_baseline(rewards, torch.zeros(6).long(), lengths, torch.ones(12), **columns)
    energy = torch.tensor(1 - 2 * p + squares).view(6, 2).cumsum(1)
    least = (energy * advantages.view(6, 2).square()).sum(0)
    for step in (-1e-3, 1e-3):
        assert ((energy * (advantages.view(6, 2) + step).square()).sum(0) > least).all()


def test_prime_hand_numbers_before_whitening():
    # Means 2 and 5; each is the other's baseline. Rewards less it: (1-5, 3-5) and (5-2); to go -6, -2 and 3.
    process, outcome = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([1.0, 0.0])
    lengths, groups = torch.tensor([2, 1]), torch.tensor([0, 0])
    raw = torch.tensor([-6.0 + 2.0, -2.0 + 2.0, 3.0 - 2.0])  # outcome 1 - 0 and 0 - 1, times 2
    advantages = prime(
        process, outcome, groups, lengths, torch.ones(3), process_coef=1.0, outcome_coef=2.0, gamma=1.0
    )
    torch.testing.assert_close(advantages, whiten(raw, torch.ones(3)))
    # gamma discounts the process term only: -4 + -2 / 2 for the first token.
    raw = torch.tensor([-5.0 + 2.0, -2.0 + 2.0, 3.0 - 2.0])
    advantages = prime(
        process, outcome, groups, lengths, torch.ones(3), process_coef=1.0, outcome_coef=2.0, gamma=0.5
    )
    torch.testing.assert_close(advantages, whiten(raw, torch.ones(3)))


def test_prime_without_process_term_is_leave_one_out_of_outcomes():
    outcome, groups, lengths = (
        torch.tensor([1.0, 0.0, 0.0, 7.0]),
        torch.tensor([0, 0, 0, 1]),
        torch.tensor([1, 2, 1, 1]),
    )
    expected = whiten(torch.tensor([1.0, -0.5, -0.5, -0.5, 0.0]), torch.ones(5))
    process = torch.randn(5, generator=torch.Generator().manual_seed(0))
    options = {"process_coef": 0.0, "outcome_coef": 5.0, "gamma": 1.0}
    torch.testing.assert_close(prime(process, outcome, groups, lengths, torch.ones(5), **options), expected)
