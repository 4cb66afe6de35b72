import math

import numpy as np
import pytest
import torch

from rl.objectives.rollout_correction import (
    criterion_metrics,
    icepop,
    metrics,
    reject,
    rejection_metrics,
    sequence_weights,
    token_weights,
)
from tests.each import each

STATISTICS = ["k1", "k2", "k3"]
LEVELS = ["token", "sequence"]


def batch(seed, num_samples=16):
    """old, rollout, lengths, mask; with empty, one-token and wholly masked samples, and outliers on both
    sides."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 15, num_samples)
    lengths[[0, 5, num_samples - 1]], lengths[[1, 7]] = 0, 1
    size, ends = lengths.sum(), np.cumsum(lengths)
    old = -rng.exponential(1.0, size)
    rollout = old + rng.normal(0, 0.2, size)
    rollout[ends[3]], rollout[ends[5]] = old[ends[3]] - 30, old[ends[5]] + 30
    mask = rng.random(size) > 0.2
    mask[[ends[3], ends[5]]] = True
    mask[ends[2] : ends[3]] = False
    return [torch.tensor(x) for x in (old, rollout, lengths, mask)]


def samples_of(lengths, mask):
    """Indices of each sample's unmasked tokens."""
    ends = np.cumsum(lengths)
    return [[t for t in range(end - length, end) if mask[t]] for end, length in zip(ends, lengths)]


def clamped(x):
    return min(max(x, -20.0), 20.0)


def statistic_of(x, statistic):
    return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[statistic]


def test_hand_numbers():
    # Trainer over engine: 2, 1/2 in the first sample, 3 in the second; the last token is masked.
    old = torch.log(torch.tensor([0.5, 0.25, 0.75, 0.9]))
    rollout = torch.log(torch.tensor([0.25, 0.5, 0.25, 0.1]))
    lengths, mask = torch.tensor([2, 0, 2]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert token_weights(old, rollout, mask, upper=2.5).tolist() == pytest.approx([2.0, 0.5, 2.5, 0.0])
    assert sequence_weights(old, rollout, lengths, mask, upper=2.5).tolist() == pytest.approx(
        [1.0, 1.0, 2.5, 0.0]
    )
    bounds = dict(low=0.6, high=2.1)
    assert icepop(old, rollout, lengths, mask, **bounds).tolist() == pytest.approx([2.0, 0.0, 0.0, 0.0])
    # Geometric means up to each token: 2, 1 and 3. Products of the samples: 1 and 3.
    found = icepop(old, rollout, lengths, mask, **bounds, level="prefix").tolist()
    assert found == pytest.approx([2.0, 0.5, 0.0, 0.0])
    found = icepop(old, rollout, lengths, mask, **bounds, level="sequence").tolist()
    assert found == pytest.approx([1.0, 1.0, 0.0, 0.0])

    def kept(level, statistic, low, high):
        return reject(
            old, rollout, lengths, mask, level=level, statistic=statistic, low=low, high=high
        ).tolist()

    assert kept("token", "k1", -0.7, 1.0) == [1.0, 1.0, 0.0, 0.0]  # k1: -0.69, 0.69, -1.10
    assert kept("token", "k1", -2.0, 0.6) == [1.0, 0.0, 1.0, 0.0]
    assert kept("token", "k2", 0.0, 0.3) == [1.0, 1.0, 0.0, 0.0]  # k2: 0.24, 0.24, 0.60
    assert kept("token", "k3", 0.0, 0.25) == [0.0, 1.0, 0.0, 0.0]  # k3: 0.31, 0.19, 0.90
    assert kept("sequence", "k1", -0.1, 0.1) == [1.0, 1.0, 0.0, 0.0]  # 0, -1.10
    assert kept("sequence", "k3", 0.0, 0.26) == [1.0, 1.0, 0.0, 0.0]  # 0.25, 0.90
    assert kept("sequence", "k2", 0.0, 0.2) == [0.0, 0.0, 0.0, 0.0]


@each("upper", [0.5, 1.3, 1e12])
@each("seed", range(3))
def test_weights_against_the_reference(seed, upper):
    old, rollout, lengths, mask = batch(seed)
    x = (old - rollout).tolist()
    per_token, per_sample = np.zeros(len(x)), np.zeros(len(x))
    popped = {level: np.zeros(len(x)) for level in ("token", "prefix", "sequence")}
    for tokens in samples_of(lengths.tolist(), mask.tolist()):
        product = math.exp(clamped(sum(x[t] for t in tokens)))
        for number, t in enumerate(tokens, start=1):
            weight = math.exp(clamped(x[t]))
            mean = math.exp(sum(clamped(x[k]) for k in tokens[:number]) / number)
            per_token[t], per_sample[t] = min(weight, upper), min(product, upper)
            popped["token"][t] = weight if 0.6 <= weight <= 1.6 else 0.0
            popped["prefix"][t] = weight if 0.6 <= mean <= 1.6 else 0.0
            popped["sequence"][t] = product if 0.6 <= product <= 1.6 else 0.0
    np.testing.assert_allclose(token_weights(old, rollout, mask, upper=upper), per_token, rtol=1e-12)
    np.testing.assert_allclose(
        sequence_weights(old, rollout, lengths, mask, upper=upper), per_sample, rtol=1e-9
    )
    for level, expected in popped.items():
        found = icepop(old, rollout, lengths, mask, low=0.6, high=1.6, level=level)
        np.testing.assert_allclose(found, expected, rtol=1e-9)
        assert 0 < (expected > 0).sum() < mask.sum()


@each("level", LEVELS)
@each("statistic", STATISTICS)
@each("seed", range(3))
def test_rejection_against_the_reference(seed, statistic, level):
    old, rollout, lengths, mask = batch(seed)
    x = (old - rollout).tolist()
    low, high = {"k1": (-0.1, 0.05), "k2": (0.0, 0.02), "k3": (-1.0, 0.02)}[statistic]
    expected = [False] * len(x)
    for tokens in samples_of(lengths.tolist(), mask.tolist()):
        values = [statistic_of(clamped(x[t]), statistic) for t in tokens]
        mean = sum(values) / max(len(values), 1)
        for t, value in zip(tokens, values):
            expected[t] = low <= (value if level == "token" else mean) <= high
    kept = reject(old, rollout, lengths, mask, level=level, statistic=statistic, low=low, high=high)
    assert kept.dtype == torch.bool and kept.tolist() == expected
    assert 0 < kept.sum() < mask.sum()


@each("level", LEVELS)
@each("statistic", STATISTICS)
def test_equal_engines_weigh_one_and_reject_nothing(statistic, level):
    old, _, lengths, mask = (x.float() if x.is_floating_point() else x for x in batch(0))
    assert torch.equal(token_weights(old, old, mask, upper=2.0), mask.float())
    assert torch.equal(sequence_weights(old, old, lengths, mask, upper=2.0), mask.float())
    assert torch.equal(icepop(old, old, lengths, mask, low=1.0, high=1.0), mask.float())
    kept = reject(old, old, lengths, mask, level=level, statistic=statistic, low=0.0, high=0.0)
    assert torch.equal(kept, mask)
    values = metrics(old, old, lengths, mask)
    assert values["rollout_corr/rollout_is_mean"] == values["rollout_corr/rollout_is_eff_sample_size"] == 1
    assert values["rollout_corr/kl"] == values["rollout_corr/k3_kl"] == values["rollout_corr/chi2_seq"] == 0


@each("bad", [float("nan"), float("inf"), -float("inf")])
def test_masked_positions_never_reach_any_result(bad):
    old, rollout, lengths, mask = batch(4)

    def outcome(fill, mask):
        a, b = (torch.where(mask.bool(), x, fill) for x in (old, rollout))
        yield token_weights(a, b, mask, upper=2.0)
        yield sequence_weights(a, b, lengths, mask, upper=2.0)
        for level in ("token", "prefix", "sequence"):
            yield icepop(a, b, lengths, mask, low=0.5, high=5.0, level=level)
        for level in LEVELS:
            yield reject(a, b, lengths, mask, level=level, statistic="k3", low=0.0, high=0.02).bool()
        yield torch.tensor(list(metrics(a, b, lengths, mask).values()))

    for clean, dirty in zip(outcome(0.0, mask), outcome(bad, mask.double())):
        assert torch.equal(clean, dirty) and clean.isfinite().all() and clean.any()


@each("statistic", STATISTICS)
@each("bad", [float("nan"), -float("inf")])
def test_nonfinite_logprob_rejects_its_token_and_sample(bad, statistic):
    old, rollout, lengths = torch.zeros(4), torch.tensor([0.0, bad, 0.0, 0.0]), torch.tensor([3, 1])
    options = dict(statistic=statistic, low=-1e9, high=1e9)
    kept = [reject(old, rollout, lengths, torch.ones(4), level=level, **options).tolist() for level in LEVELS]
    assert kept == [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]


def test_results_are_constants_of_the_input_dtype():
    old, rollout, lengths, mask = batch(2)
    old = old.float().requires_grad_()
    results = [
        token_weights(old, rollout.float(), mask, upper=2.0),
        sequence_weights(old, rollout.float(), lengths, mask, upper=2.0),
        icepop(old, rollout.float(), lengths, mask, low=0.5, high=2.0),
    ]
    assert all(x.dtype == torch.float32 and not x.requires_grad for x in results)


@each("lengths, size", [([], 0), ([0, 0], 0), ([2, 1], 3)])
def test_batches_without_an_unmasked_token(lengths, size):
    nothing, lengths, mask = (
        torch.full((size,), float("nan")),
        torch.tensor(lengths, dtype=torch.int64),
        torch.zeros(size),
    )
    zeros = [0.0] * size
    assert token_weights(nothing, nothing, mask, upper=2.0).tolist() == zeros
    assert sequence_weights(nothing, nothing, lengths, mask, upper=2.0).tolist() == zeros
    for level in ("token", "prefix", "sequence"):
        assert icepop(nothing, nothing, lengths, mask, low=0.5, high=2.0, level=level).tolist() == zeros
    for level in LEVELS:
        assert (
            reject(nothing, nothing, lengths, mask, level=level, statistic="k1", low=-1, high=1).tolist()
            == zeros
        )
    assert metrics(nothing, nothing, lengths, mask) == {}


@each("level", LEVELS)
@each("seed", range(3))
def test_metrics_against_the_reference(seed, level):
    old, rollout, lengths, mask = batch(seed)
    p, q = old.numpy(), rollout.numpy()
    samples = [tokens for tokens in samples_of(lengths.tolist(), mask.tolist()) if tokens]
    tokens = sum(samples, [])
    w = np.array([math.exp(clamped(p[t] - q[t])) for t in tokens])
    log_ppl, rollout_log_ppl = (np.array([-x[tokens].mean() for tokens in samples]) for x in (p, q))
    diff = log_ppl - rollout_log_ppl
    product = np.array([math.exp(clamped((p[tokens] - q[tokens]).sum())) for tokens in samples])
    expected = {
        "kl": (q - p)[tokens].mean(),
        "k3_kl": np.mean([statistic_of(clamped(p[t] - q[t]), "k3") for t in tokens]),
        "chi2_token": (w**2).mean() - 1,
        "rollout_is_mean": w.mean(),
        "rollout_is_std": w.std(),
        "rollout_is_min": w.min(),
        "rollout_is_max": w.max(),
        "rollout_is_eff_sample_size": 1 / ((w / w.mean()) ** 2).mean(),
        "training_ppl": np.exp(log_ppl).mean(),
        "training_log_ppl": log_ppl.mean(),
        "rollout_ppl": np.exp(rollout_log_ppl).mean(),
        "rollout_log_ppl": rollout_log_ppl.mean(),
        "ppl_ratio": np.exp(diff).mean(),
        "log_ppl_diff": diff.mean(),
        "log_ppl_abs_diff": np.abs(diff).mean(),
        "log_ppl_diff_max": diff.max(),
        "log_ppl_diff_min": diff.min(),
        "chi2_seq": (product**2).mean() - 1,
    }
    of_sample = product
    if level == "token":
        ratios = [[math.exp(clamped(p[t] - q[t])) for t in tokens] for tokens in samples]
        of_sample = np.array([np.mean(of_tokens) for of_tokens in ratios])
    weighed = w if level == "token" else product
    expected |= {
        "rollout_is_ratio_fraction_high": (weighed > 1.3).mean(),
        "rollout_is_ratio_fraction_low": (weighed < 1 / 1.3).mean(),
        "rollout_is_seq_mean": of_sample.mean(),
        "rollout_is_seq_std": of_sample.std(ddof=1),
        "rollout_is_seq_max": of_sample.max(),
        "rollout_is_seq_min": of_sample.min(),
        "rollout_is_seq_max_deviation": np.abs(of_sample - 1).max(),
        "rollout_is_seq_fraction_high": (of_sample > 1.3).mean(),
        "rollout_is_seq_fraction_low": (of_sample < 1 / 1.3).mean(),
    }
    assert all(0 < expected[f"rollout_is_ratio_fraction_{side}"] < 1 for side in ("low", "high"))
    values = metrics(old, rollout, lengths, mask, level=level, upper=1.3)
    assert values == pytest.approx(
        {f"rollout_corr/{name}": value for name, value in expected.items()}, rel=1e-9
    )
    assert all(type(value) is float for value in values.values())


@each("level", LEVELS)
@each("statistic", STATISTICS)
@each("seed", range(2))
def test_criterion_metrics_against_the_reference(seed, statistic, level):
    old, rollout, lengths, mask = batch(seed)
    x = (old - rollout).tolist()
    low, high = {"k1": (-0.1, 0.05), "k2": (0.0, 0.02), "k3": (0.0, 0.02)}[statistic]
    options = dict(level=level, statistic=statistic, low=low, high=high)
    kept = reject(old, rollout, lengths, mask, **options)
    samples = [tokens for tokens in samples_of(lengths.tolist(), mask.tolist()) if tokens]
    values = [np.array([statistic_of(clamped(x[t]), statistic) for t in tokens]) for tokens in samples]
    means = np.array([v.mean() for v in values])
    if level == "sequence":
        values = [np.full(len(v), v.mean()) for v in values]
    tokens, lost = np.concatenate(values), [any(not kept[t] for t in tokens) for tokens in samples]
    judged = tokens if level == "token" else means
    expected = {
        "mean": tokens.mean(),
        "max": judged.max(),
        "min": judged.min(),
        "fraction_high": (judged > high).mean(),
        "fraction_low": (judged < low).mean(),
        "std": tokens.clip(low, high).std(),
        "seq_mean": means.mean(),
        "seq_std": means.std(ddof=1),
        "seq_max": means.max(),
        "seq_min": means.min(),
        "seq_max_deviation": np.abs(means).max(),
        "seq_fraction_high": (means > high).mean(),
        "seq_fraction_low": (means < low).mean(),
        "masked_fraction": 1 - kept.sum().item() / mask.sum().item(),
        "seq_masked_fraction": np.mean(lost),
    }
    name = f"rollout_corr/rollout_rs_{'token' if level == 'token' else 'seq_mean'}_{statistic}"
    found = criterion_metrics(old, rollout, lengths, mask, kept, **options)
    expected_names = {f"{name}_{key}": value for key, value in expected.items()}
    assert found == pytest.approx(expected_names, rel=1e-9, abs=1e-12)
    assert 0 < expected["masked_fraction"] < 1 and all(type(value) is float for value in found.values())


def test_rejection_metrics_by_hand():
    lengths, mask = torch.tensor([2, 0, 2, 1]), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    found = rejection_metrics(lengths, mask, torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]))
    assert found == pytest.approx(
        {"rollout_corr/rollout_rs_masked_fraction": 1 / 3, "rollout_corr/rollout_rs_seq_masked_fraction": 0.5}
    )
    assert rejection_metrics(lengths, mask * 0, mask * 0) == {}


@each("upper", [0.0, -1.0, float("nan")])
def test_truncation_to_nothing_is_refused(upper):
    with pytest.raises(ValueError, match="truncated"):
        token_weights(*[torch.zeros(1)] * 3, upper=upper)
    with pytest.raises(ValueError, match="truncated"):
        sequence_weights(torch.zeros(1), torch.zeros(1), torch.tensor([1]), torch.ones(1), upper=upper)


@each("low, high", [(1.1, 5.0), (0.5, 0.9), (-0.1, 5.0), (5.0, 0.5)])
def test_icepop_bounds_that_drop_tokens_in_agreement_are_refused(low, high):
    with pytest.raises(ValueError, match="1 must be among"):
        icepop(*[torch.zeros(1)] * 4, low=low, high=high)


@each(
    "options, message",
    [
        (dict(level="token", statistic="k1", low=0.5, high=2.0), "give their logs"),
        (dict(level="token", statistic="k2", low=-1.0, high=-0.5), "0 must be among"),
        (dict(level="sample", statistic="k1", low=-1.0, high=1.0), "sample.*token, sequence"),
        (dict(level="token", statistic="k4", low=-1.0, high=1.0), "k4.*k1, k2, k3"),
    ],
)
def test_rejections_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        reject(torch.zeros(1), torch.zeros(1), torch.tensor([1]), torch.ones(1), **options)
