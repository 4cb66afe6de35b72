import json
from collections import Counter
from itertools import combinations
from math import comb, isclose

import numpy as np
import pytest

from rl.run.validation_metrics import (
    best_at,
    best_std_at,
    majority_at,
    mean_at,
    std_at,
    validation_metrics,
    worst_at,
    worst_std_at,
)


def random_values(num_prompts=7, k=6, *, seed=0, binary=False):
    rng = np.random.default_rng(seed)
    return (rng.random((num_prompts, k)) < 0.4).astype(float) if binary else rng.normal(size=(num_prompts, k))


def over_subsets(row, n, reduce):
    return np.mean([reduce([row[i] for i in subset]) for subset in combinations(range(len(row)), n)])


def vote(values, answers):
    """Majority by counting, one subset: a second implementation."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return np.mean(values)
    top = [answer for answer, count in counts.items() if count == max(counts.values())]
    return np.mean([np.mean([v for v, a in zip(values, answers) if a == answer]) for answer in top])


# ---- best and worst ----


@pytest.mark.parametrize("n", range(1, 7))
def test_best_and_worst_are_the_means_over_all_subsets(n):
    values = random_values()
    np.testing.assert_allclose(best_at(values, n), [over_subsets(row, n, max) for row in values], rtol=1e-12)
    np.testing.assert_allclose(worst_at(values, n), [over_subsets(row, n, min) for row in values], rtol=1e-12)


@pytest.mark.parametrize("n", range(1, 7))
def test_the_std_of_best_and_worst_is_that_over_all_subsets(n):
    values = random_values()
    subsets = list(combinations(range(6), n))
    for std_of, reduce in ((best_std_at, np.max), (worst_std_at, np.min)):
        expected = [np.std([reduce(row[list(subset)]) for subset in subsets]) for row in values]
        np.testing.assert_allclose(std_of(values, n), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(best_std_at(values, 1), std_at(values), rtol=1e-12)


@pytest.mark.parametrize("k, n", [(1, 1), (8, 1), (8, 3), (8, 8), (200, 100)])
def test_best_of_zeros_and_ones_is_the_unbiased_pass_at_n(k, n):
    for num_correct in (0, 1, k // 2, k):
        values = np.zeros((1, k))
        values[0, :num_correct] = 1
        expected = 1 - comb(k - num_correct, n) / comb(k, n)
        assert best_at(np.random.default_rng(0).permuted(values, axis=1), n)[0] == pytest.approx(
            expected, abs=1e-12
        )


def test_best_of_a_thousand_samples_neither_overflows_nor_leaves_the_range_of_the_values():
    values = random_values(2, 1024)
    for n in (1, 2, 512, 1024):
        assert np.isfinite(best_at(values, n)).all()
        assert (best_at(values, n) <= values.max(axis=1) + 1e-9).all()
    np.testing.assert_allclose(best_at(values, 1), mean_at(values))
    np.testing.assert_allclose(best_at(values, 1024), values.max(axis=1))
    np.testing.assert_allclose(worst_at(values, 1024), values.min(axis=1))


def test_std_divides_by_the_number_of_samples():
    np.testing.assert_allclose(std_at(np.array([[0.0, 0.0, 1.0, 1.0]])), [0.5])


# ---- majority ----


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
def test_majority_is_the_mean_over_all_subsets(n):
    rng = np.random.default_rng(1)
    values = random_values()
    answers = [[rng.choice(["a", "b", "c", None]) for _ in range(6)] for _ in values]
    expected = [
        np.mean([vote([row[i] for i in s], [said[i] for i in s]) for s in combinations(range(6), n)])
        for row, said in zip(values, answers)
    ]
    np.testing.assert_allclose(majority_at(values, answers, n), expected, rtol=1e-12)


def test_hand_numbers_of_the_majority():
    right = np.array([[1.0, 1.0, 0.0, 0.0, 0.0]])
    assert majority_at(right, [["4", "4", "5", "6", None]], 5)[0] == 1.0
    assert majority_at(right, [["4", "4", "5", "5", "5"]], 5)[0] == 0.0
    assert (
        majority_at(right, [["4", "4", "5", "5", None]], 5)[0] == 0.5
    )  # a tie: no order of the samples decides it
    assert majority_at(right, [[None] * 5], 5)[0] == 0.4
    assert majority_at(np.zeros((1, 2)), [[None, None]], 2)[0] == 0.0


def test_the_order_of_the_samples_does_not_matter():
    values, answers = np.array([[1.0, 0.0, 0.0, 1.0]]), ["x", "y", None, "x"]
    order = [2, 0, 3, 1]
    shuffled = [[answers[i] for i in order]]
    for n in (1, 2, 3, 4):
        assert isclose(majority_at(values, [answers], n)[0], majority_at(values[:, order], shuffled, n)[0])


def test_random_subsets_are_reproducible_and_close_to_all_of_them():
    rng = np.random.default_rng(2)
    answers = [["a" if rng.random() < 0.45 else str(rng.integers(4)) for _ in range(14)] for _ in range(20)]
    values = np.array([[float(answer == "a") for answer in row] for row in answers])
    exact = np.mean(
        [
            np.mean([vote([v[i] for i in s], [a[i] for i in s]) for s in combinations(range(14), 4)])
            for v, a in zip(values[:3], answers[:3])
        ]
    )
    drawn = majority_at(
        values[:3], answers[:3], 4
    ).mean()  # comb(14, 4) = 1001 subsets: one too many for all of them
    assert drawn != exact and abs(drawn - exact) < 0.03
    assert np.array_equal(majority_at(values, answers, 4), majority_at(values, answers, 4))
    assert not np.array_equal(majority_at(values, answers, 4), majority_at(values, answers, 4, seed=1))


# ---- names ----


def test_core_metrics_are_those_of_the_largest_subset_and_the_rest_is_auxiliary():
    values = {"openai/gsm8k": {"acc": [np.array([1, 0, 0, 0.0]), np.array([1, 1, 1, 1.0])]}}
    answers = {"openai/gsm8k": [["1", "2", "2", "3"], ["1", "1", "1", "1"]]}
    assert validation_metrics(values, answers) == pytest.approx(
        {
            "val-core/openai/gsm8k/acc/mean@4": 0.625,
            "val-aux/openai/gsm8k/acc/std@4": (0.1875**0.5) / 2,
            "val-aux/openai/gsm8k/acc/best@2/mean": (0.5 + 1) / 2,
            "val-aux/openai/gsm8k/acc/best@2/std": 0.5 / 2,
            "val-aux/openai/gsm8k/acc/worst@2/mean": 0.5,
            "val-aux/openai/gsm8k/acc/worst@2/std": 0.0,
            # Six pairs of answers: three ties with the right one, worth 1/2 each, and three without it.
            "val-aux/openai/gsm8k/acc/maj@2/mean": ((2 * 0.5 + 0.5) / 6 + 1) / 2,
            "val-aux/openai/gsm8k/acc/maj@2/std": 0.25 / 2,
            "val-core/openai/gsm8k/acc/best@4/mean": 1.0,
            "val-core/openai/gsm8k/acc/best@4/std": 0.0,
            "val-aux/openai/gsm8k/acc/worst@4/mean": 0.5,
            "val-aux/openai/gsm8k/acc/worst@4/std": 0.0,
            "val-core/openai/gsm8k/acc/maj@4/mean": 0.5,
            "val-core/openai/gsm8k/acc/maj@4/std": 0.0,
        }
    )


def test_one_sample_per_prompt_has_a_mean_and_nothing_else():
    values = {"a": {"acc": [np.array([1.0]), np.array([0.0])], "score": [np.array([2.0]), np.array([-2.0])]}}
    assert validation_metrics(values, {"a": [["x"], ["y"]]}) == {
        "val-core/a/acc/mean@1": 0.5,
        "val-aux/a/score/mean@1": 0.0,
    }


def test_sizes_are_powers_of_two_and_the_number_of_samples():
    names = validation_metrics({"a": {"acc": list(random_values(3, 12, binary=True))}})
    assert {name.split("/")[3] for name in names if "best" in name} == {
        "best@2",
        "best@4",
        "best@8",
        "best@12",
    }
    core = [name.removeprefix("val-core/a/acc/") for name in names if name.startswith("val-core")]
    assert core == ["mean@12", "best@12/mean", "best@12/std"]


def test_without_acc_the_score_is_the_core_variable():
    names = validation_metrics({"a": {"score": [np.array([1.0, 3.0])], "length": [np.array([5.0, 7.0])]}})
    assert names["val-core/a/score/mean@2"] == 2.0 and names["val-core/a/score/best@2/mean"] == 3.0
    assert names["val-aux/a/length/mean@2"] == 6.0


def test_a_variable_that_some_samples_lack_has_the_mean_over_those_that_have_it():
    nan = float("nan")
    values = {
        "a": {
            "acc": [np.array([1.0, 0.0])] * 3,
            "detail": [np.array([2.0, nan]), np.array([4.0, 6.0]), np.array([nan, nan])],
            "absent": [np.array([nan, nan])] * 3,
        }
    }
    metrics = validation_metrics(values)
    assert metrics["val-aux/a/detail/mean@2"] == 3.5
    assert not any("detail" in name and "mean@2" not in name or "absent" in name for name in metrics)


def test_sources_may_have_different_numbers_of_samples_and_predictions():
    values = {
        "a": {"acc": [np.array([1.0, 0.0])]},
        "b": {"acc": [np.array([1.0])]},
        "c": {"acc": [np.array([1.0, 1.0])]},
    }
    names = validation_metrics(values, {"a": [["x", "y"]], "c": [[None, None]]})
    assert "val-core/a/acc/maj@2/mean" in names and "val-core/b/acc/mean@1" in names
    assert not any(name.startswith("val-core/c/acc/maj") for name in names)


def test_metrics_are_plain_finite_floats():
    metrics = validation_metrics({"a": {"acc": list(random_values(3, 5, binary=True).astype(np.float32))}})
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())
    json.dumps(metrics)
