"""A test that an engine with drafts samples from the distribution of its reported log-probs."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

SAMPLES = range(512, 4097)
"""Possible numbers of samples of one prompt on each replica."""
NUM_TOKENS, TOP_K = 4, 4
"""Tokens of a sample, and most probable tokens to sample from."""
COST = 0.1
"""Largest share of the test in the tokens of the first generation, if 512 samples are not more."""
EXPECTED = 5.0
"""Minimum expected count of a cell of the test (Cochran 1954). Rarer tokens share one cell."""
LIMIT = 6.0
"""Normal deviate above which the test fails: a right distribution exceeds it once in 1e9 tests."""


def num_test_samples(num_tokens: int) -> int:
    """Return the samples of the test on a replica. num_tokens: the most that its generation can have."""
    return min(max(int(COST * num_tokens) // NUM_TOKENS, SAMPLES.start), SAMPLES.stop - 1)


def chi_square(completions: Iterable[tuple[np.ndarray, np.ndarray]], *, top_k: int = 0) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom, over the contexts that occurred often enough.

    Tokens that follow equal tokens have one distribution, up to rounding. The expected count of a token is
    based on the harmonic mean of its probabilities in the samples that have it, which the choice of these
    samples does not bias. If rounding changes the set of the top_k tokens, only the more probable half has
    cells of its own. The first tokens have no drafts and are left out.

    completions: token ids [R] and their log-probs [R] for samples of one prompt. top_k: 0: all.
    """
    counts: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
    inverses: defaultdict[tuple[bytes, int], float] = defaultdict(float)
    for token_ids, logprobs in completions:
        for number in range(1, len(token_ids)):
            context, token = token_ids[:number].tobytes(), int(token_ids[number])
            counts[context][token] += 1
            probability = math.exp(logprobs[number])
            inverses[context, token] += 1 / probability if probability else math.inf
    statistic, freedom = 0.0, 0
    for context, seen in counts.items():
        total = seen.total()
        expected = {token: total * count / inverses[context, token] for token, count in seen.items()}
        own = sorted((t for t in seen if expected[t] >= EXPECTED), key=lambda t: -expected[t])
        is_more = top_k and sum(count > 0 for count in expected.values()) > top_k
        cells = [(float(seen[t]), expected[t]) for t in own[: top_k // 2 if is_more else None]]
        # A token with an expected count of 5 is missing with probability e^-5, and then in the common cell.
        rest = total - sum(n for n, _ in cells), total - sum(count for _, count in cells)
        if rest[1] >= EXPECTED or rest[0]:
            cells.append(rest)
        if len(cells) > 1:
            statistic += sum((n - count) ** 2 / max(count, EXPECTED) for n, count in cells)
            freedom += len(cells) - 1
    return statistic, freedom


def deviate(statistic: float, freedom: int) -> float:
    """Return the normal deviate of a chi-square statistic (Wilson, Hilferty 1931); 0 without any freedom."""
    if not freedom:
        return 0.0
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
