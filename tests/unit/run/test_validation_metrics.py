"""Statistics over the samples of a prompt, against an enumeration of all subsets, and the metrics' names."""

import json
from collections import Counter
from itertools import combinations
from math import comb

import numpy as np
import pytest

from rl.config.schema import load_config
from rl.rewards import dapo, gsm8k, math
from rl.rewards.score import to_score
from rl.run.validation import validation_sampling
from rl.run.validation_metrics import (
    best_at,
    best_std_at,
    majorities,
    validation_metrics,
    worst_at,
    worst_std_at,
)

VALUES = np.random.default_rng(0).normal(size=(7, 6))
SIZES = pytest.mark.parametrize("n", range(1, 7))
NAN = float("nan")


def vote(values, answers):
    """Majority of one subset by counting: a second implementation."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return np.mean(values)
    top = [answer for answer, count in counts.items() if count == max(counts.values())]
    return np.mean([np.mean([v for v, a in zip(values, answers) if a == answer]) for answer in top])


def votes(values, answers, n):
    """Mean over all subsets of `n` samples of one prompt."""
    subsets = combinations(range(len(values)), n)
    return np.mean([vote([values[i] for i in s], [answers[i] for i in s]) for s in subsets])


@SIZES
def test_best_and_worst_agree_with_all_subsets(n):
    subsets = np.array(list(combinations(range(6), n)))
    for mean_of, std_of, reduce in ((best_at, best_std_at, np.max), (worst_at, worst_std_at, np.min)):
        chosen = reduce(VALUES[:, subsets], axis=2)
        np.testing.assert_allclose(mean_of(VALUES, n), chosen.mean(axis=1), rtol=1e-12)
        np.testing.assert_allclose(std_of(VALUES, n), chosen.std(axis=1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k, n", [(1, 1), (8, 1), (8, 3), (8, 8), (200, 100)])
def test_best_of_zeros_and_ones_is_the_unbiased_pass_at_n(k, n):
    for correct in (0, 1, k // 2, k):
        values = np.random.default_rng(0).permutation([1.0] * correct + [0.0] * (k - correct))[None]
        assert best_at(values, n)[0] == pytest.approx(1 - comb(k - correct, n) / comb(k, n), abs=1e-12)


def test_a_thousand_samples_do_not_overflow():
    values = np.random.default_rng(0).normal(size=(2, 1024))
    for n in (1, 2, 512, 1024):
        assert np.isfinite(best_at(values, n)).all()
        assert (best_at(values, n) <= values.max(axis=1) + 1e-9).all()
    np.testing.assert_allclose(best_at(values, 1), values.mean(axis=1))
    np.testing.assert_allclose(best_at(values, 1024), values.max(axis=1))
    np.testing.assert_allclose(worst_at(values, 1024), values.min(axis=1))


def test_std_divides_by_the_number_of_samples():
    metrics = validation_metrics({"s": {"acc": [np.array([0.0, 0.0, 1.0, 1.0])]}})
    assert metrics["val-aux/s/acc/std@4"] == 0.5


@SIZES
def test_majority_is_the_mean_over_all_subsets(n):
    rng = np.random.default_rng(1)
    answers = [[rng.choice(["a", "b", "c", None]) for _ in range(6)] for _ in VALUES]
    expected = [votes(row, said, n) for row, said in zip(VALUES, answers)]
    np.testing.assert_allclose(majorities(VALUES, answers, n).mean(axis=1), expected, rtol=1e-12)
    backwards = majorities(VALUES[:, ::-1], [row[::-1] for row in answers], n)
    np.testing.assert_allclose(backwards.mean(axis=1), expected, rtol=1e-12)


@pytest.mark.parametrize(
    "answers, expected",
    [
        (["4", "4", "5", "6", None], 1.0),
        (["4", "4", "5", "5", "5"], 0.0),
        (["4", "4", "5", "5", None], 0.5),  # a tie, which the order of the samples does not decide
        ([None] * 5, 0.4),
    ],
)
def test_majority_by_hand(answers, expected):
    assert majorities(np.array([[1.0, 1.0, 0.0, 0.0, 0.0]]), [answers], 5)[0].mean() == expected


@pytest.mark.parametrize("reward, right", [(gsm8k, "#### 4"), (dapo, "Answer: 4"), (math, "\\boxed{4}")])
def test_responses_without_an_answer_do_not_vote(reward, right):
    scores = [to_score(reward.score("", text, "4")) for text in [right] * 7 + ["I do not know"] * 9]
    values = {"s": {"acc": [np.array([score.values["acc"] for score in scores])]}}
    metrics = validation_metrics(values, {"s": [[score.prediction for score in scores]]})
    assert metrics["val-core/s/acc/maj@16/mean"] == 1.0


def test_random_subsets_are_reproducible_and_close_to_all():
    rng = np.random.default_rng(2)
    answers = [["a" if rng.random() < 0.45 else str(rng.integers(4)) for _ in range(14)] for _ in range(3)]
    values = np.array([[float(answer == "a") for answer in row] for row in answers])
    exact = np.mean([votes(row, said, 4) for row, said in zip(values, answers)])
    drawn = majorities(values, answers, 4)  # comb(14, 4) = 1001 subsets: one too many for all of them
    assert drawn.mean() != exact and abs(drawn.mean() - exact) < 0.03
    assert np.array_equal(drawn, majorities(values, answers, 4))
    assert not np.array_equal(drawn, majorities(values, answers, 4, seed=1))


def test_core_metrics_are_those_of_the_largest_subset():
    source = "openai/gsm8k"
    values = {source: {"acc": [np.array([1, 0, 0, 0.0]), np.array([1, 1, 1, 1.0])]}}
    expected = {
        "val-core mean@4": 0.625,
        "val-aux std@4": (0.1875**0.5) / 2,
        "val-aux best@2/mean": (0.5 + 1) / 2,
        "val-aux best@2/std": 0.5 / 2,
        "val-aux worst@2/mean": 0.5,
        "val-aux worst@2/std": 0.0,
        # Six pairs of answers: three ties with the right one, worth 1/2 each, and three without it.
        "val-aux maj@2/mean": ((2 * 0.5 + 0.5) / 6 + 1) / 2,
        "val-aux maj@2/std": 0.25 / 2,
        "val-core best@4/mean": 1.0,
        "val-core best@4/std": 0.0,
        "val-aux worst@4/mean": 0.5,
        "val-aux worst@4/std": 0.0,
        "val-core maj@4/mean": 0.5,
        "val-core maj@4/std": 0.0,
    }
    found = validation_metrics(values, {source: [["1", "2", "2", "3"], ["1"] * 4]})
    assert found == pytest.approx({k.replace(" ", f"/{source}/acc/"): v for k, v in expected.items()})
    assert all(type(value) is float for value in found.values())
    json.dumps(found, allow_nan=False)


def test_one_sample_per_prompt_has_only_a_mean():
    values = {"a": {"acc": [np.array([1.0]), np.array([0.0])], "score": [np.array([2.0]), np.array([-2.0])]}}
    expected = {"val-core/a/acc/mean@1": 0.5, "val-aux/a/score/mean@1": 0.0}
    assert validation_metrics(values, {"a": [["x"], ["y"]]}) == expected


def test_sizes_are_powers_of_two_and_the_number_of_samples():
    names = validation_metrics({"a": {"acc": [np.zeros(12), np.ones(12)]}})
    best = {name.split("/")[3] for name in names if "best" in name}
    assert best == {"best@2", "best@4", "best@8", "best@12"}
    core = [name.removeprefix("val-core/a/acc/") for name in names if name.startswith("val-core")]
    assert core == ["mean@12", "best@12/mean", "best@12/std"]


def test_without_acc_the_score_is_the_core_variable():
    metrics = validation_metrics({"a": {"score": [np.array([1.0, 3.0])], "length": [np.array([5.0, 7.0])]}})
    assert metrics["val-core/a/score/mean@2"] == 2.0 and metrics["val-core/a/score/best@2/mean"] == 3.0
    assert metrics["val-aux/a/length/mean@2"] == 6.0


def test_missing_values_leave_the_mean_over_the_others():
    detail = [np.array([2.0, NAN]), np.array([4.0, 6.0]), np.array([NAN, NAN])]
    rows = {"acc": [np.array([1.0, 0.0])] * 3, "detail": detail, "absent": [np.array([NAN, NAN])] * 3}
    metrics = validation_metrics({"a": rows})
    assert metrics["val-aux/a/detail/mean@2"] == 3.5
    assert not any("detail" in name and "mean@2" not in name or "absent" in name for name in metrics)


def test_sources_differ_in_samples_and_predictions():
    values = {name: {"acc": [np.ones(k)]} for name, k in {"a": 2, "b": 1, "c": 2}.items()}
    names = validation_metrics(values, {"a": [["x", "y"]], "c": [[None, None]]})
    assert "val-core/a/acc/maj@2/mean" in names and "val-core/b/acc/mean@1" in names
    assert not any(name.startswith("val-core/c/acc/maj") for name in names)


def test_validation_samples_with_its_own_distribution():
    rollout = ["rollout.top_k=20", "validation.temperature=0.6", "validation.samples_per_prompt=4"]
    same = validation_sampling(load_config(None, rollout))
    assert (same.samples_per_prompt, same.temperature, same.top_p, same.top_k) == (4, 0.6, 1.0, 20)
    other = validation_sampling(load_config(None, [*rollout, "validation.top_p=0.7", "validation.top_k=5"]))
    assert (other.top_p, other.top_k) == (0.7, 5)
