"""The chi-square test of drafted samples accepts the reported distribution and finds another one."""

import numpy as np
import pytest

from rl.features.drafts.check import LIMIT, chi_square, deviate, num_test_samples

P = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


def samples(drawn: np.ndarray, count: int, seed: int):
    """Return samples of 3 tokens from `drawn`, which report the log-probs of P."""
    tokens = np.random.default_rng(seed).choice(5, size=(count, 3), p=drawn).astype(np.int32)
    return [(row, np.log(P)[row]) for row in tokens]


@pytest.mark.parametrize("seed", range(20))
def test_the_reported_distribution_is_accepted(seed):
    statistic, freedom = chi_square(samples(P, 4096, seed))
    assert freedom > 4 * 5  # second tokens, and third ones after the pairs that occurred often
    assert abs(deviate(statistic, freedom)) < LIMIT


def test_a_wrong_distribution_is_found():
    assert deviate(*chi_square(samples(np.array([0.46, 0.27, 0.13, 0.09, 0.05]), 4096, 1))) > LIMIT


def test_tokens_of_almost_no_probability_are_found():
    found = [(np.array([0, 1, 2]), np.log([0.5, 0.999, 0.999]))] * 500
    wrong = [(np.array([0, 3, 2]), np.log([0.5, 1e-6, 0.999]))] * 20
    assert deviate(*chi_square(found)) < LIMIT < deviate(*chi_square(found + wrong))


def test_sets_of_tokens_that_rounding_changes_are_accepted():
    found = []
    for last, seed in ((3, 1), (4, 2)):
        drawn = np.random.default_rng(seed).choice(4, size=(2048, 3), p=P[:4] / P[:4].sum())
        tokens = np.where(drawn == 3, last, drawn).astype(np.int32)
        found += zip(tokens, np.log(P[:4] / P[:4].sum())[drawn])
    assert deviate(*chi_square(found, top_k=4)) < LIMIT < deviate(*chi_square(found))


def test_few_samples_say_nothing():
    assert deviate(*chi_square(samples(P, 3, 1))) == 0.0


def test_the_test_is_in_proportion_to_the_generation():
    assert [num_test_samples(n) for n in (0, 4_096, 80_000, 10**7)] == [512, 512, 2_000, 4_096]
