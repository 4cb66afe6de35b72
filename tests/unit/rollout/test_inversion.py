"""Hashed numbers are uniform and independent; inversion samples each token with its probability."""

import numpy as np
import pytest
import torch

from rl.rollout import inversion
from rl.rollout.inversion import invert, uniforms
from rl.rollout.sampling import seed_of

COUNT = 1 << 16
PAST = 1e-4
"""Minimum probability of both tails of the chi-square statistic. The numbers are fixed."""


def streams():
    """Return numbers of consecutive seeds at one position, of a run's seeds, and of one seed's positions."""
    counter = np.arange(COUNT)
    of_run = np.array([seed_of(1, "train.3", i) for i in range(COUNT)], np.uint64)
    return {
        "seeds": uniforms(counter.astype(np.uint64), np.full(COUNT, 7)),
        "seeds of a run": uniforms(of_run, np.zeros(COUNT, np.int64)),
        "positions": uniforms(np.full(COUNT, seed_of(2), np.uint64), counter),
    }


def assert_plausible(counts: np.ndarray, expected: np.ndarray | float) -> None:
    statistic = torch.tensor(((counts - expected) ** 2 / expected).sum())
    below = torch.special.gammainc(torch.tensor((counts.size - 1) / 2), statistic / 2)  # chi-square's CDF
    assert PAST < below < 1 - PAST, below


@pytest.mark.parametrize("name", ["seeds", "seeds of a run", "positions"])
def test_numbers_are_uniform_and_independent(name):
    numbers = streams()[name]
    assert 0 <= numbers.min() and numbers.max() < 1
    assert_plausible(np.bincount((numbers * 256).astype(int), minlength=256), COUNT / 256)
    for lag in (1, 2, 16):
        pairs = (numbers[:-lag] * 16).astype(int) * 16 + (numbers[lag:] * 16).astype(int)
        assert_plausible(np.bincount(pairs, minlength=256), len(pairs) / 256)


@pytest.mark.parametrize("name", ["seeds", "positions"])
def test_tokens_are_sampled_with_their_probabilities(name):
    probabilities = torch.tensor([0.5, 0.0, 0.25, 0.2, 0.04, 0.0099, 0.0001])
    tokens = invert(probabilities.log().expand(COUNT, -1), torch.from_numpy(streams()[name]))
    counts, possible = np.bincount(tokens, minlength=7), probabilities.numpy() > 0
    assert counts[1] == 0
    assert_plausible(counts[possible], COUNT * probabilities.numpy()[possible])


def test_the_ends_of_the_interval_are_possible_tokens():
    logprobs = torch.tensor([0.0, 0.5, 0.5, 0.0]).log().expand(2, -1)
    assert invert(logprobs, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)).tolist() == [1, 2]


def test_large_vocabularies_are_summed_exactly(monkeypatch):
    # 2^20 tokens of equal probability: float32 sums would be wrong by thousands of tokens.
    num_tokens = 1 << 20
    places = torch.tensor([0, 1, num_tokens // 3, num_tokens - 2, num_tokens - 1])
    uniform = (places.double() + 0.5) / num_tokens
    logprobs = torch.full((len(places), num_tokens), 1 / num_tokens).log()
    assert invert(logprobs, uniform).tolist() == places.tolist()
    monkeypatch.setattr(inversion, "CHUNK", num_tokens * 2)
    assert invert(logprobs, uniform).tolist() == places.tolist()


def test_no_token_is_drawn_from_what_is_not_a_number():
    logprobs = torch.log_softmax(torch.zeros(3, 5), -1)
    logprobs[1, 2] = torch.nan
    with pytest.raises(
        ValueError, match="^sampler check: .* are NaN; weights of model.path, .* not finite.$"
    ):
        invert(logprobs, torch.full((3,), 0.5, dtype=torch.float64))
