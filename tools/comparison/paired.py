"""Is B better than A? A test over prompts and seeds, with its interval and its power.

Both arms answer the same prompts, and each arm has one or more seeds. With S seeds and P prompts an arm is a
table of accuracies, float64 [S, P]. The difference is the mean of B minus the mean of A. Its variance counts
both ways in which values depend on each other (Cameron, Gelbach and Miller 2011): over prompts, which all
seeds share, plus over seeds, whose prompts share one training, minus the noise that both count. With one seed
per arm the variance of seeds is unknown, so the answer is about these two runs alone.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

ALPHA = 0.04
"""Share of equal pairs that may be called different. The limit is 5 %; the rest is for the approximation."""
POWER = 0.8
"""Probability with which the advised number of seeds or prompts finds the margin."""
ROUNDS = 1000
"""Number of bootstrap samples of the prompts."""
DRAWS = 20_000
"""Number of draws of a t distribution."""
MOST_SEEDS, MOST_PROMPTS = 64, 1_000_000
"""Largest numbers that are advised."""


@dataclass(frozen=True)
class Comparison:
    """The difference B - A between two arms."""

    difference: float
    low: float
    high: float
    """Ends of the interval of the difference, which has a confidence of 1 - ALPHA."""
    power: float
    """Probability that such a comparison finds a true difference of `margin`."""
    margin: float
    shape: tuple[int, int]
    """Seeds of the arm with fewer seeds, and prompts."""
    variances: tuple[float, float, float]
    """Parts (p, s, n) of the variance of the difference, which is p / prompts + s / seeds + n / both."""

    @property
    def is_different(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def text(self) -> str:
        """The answer, in one sentence."""
        if self.is_different:
            name, low, high = ("B", self.low, self.high) if self.low > 0 else ("A", -self.high, -self.low)
            return f"{name} is better by {abs(self.difference):.4f} ({low:.4f} to {high:.4f})"
        found = f"B - A is {self.difference:+.4f} ({self.low:+.4f} to {self.high:+.4f})"
        if -self.margin < self.low and self.high < self.margin:
            return f"no difference: {found}, less than {self.margin:g}"
        return (
            f"unknown: {found}; a difference of {self.margin:g} {self.needs()} (power now {self.power:.0%})"
        )

    def needs(self) -> str:
        """Return how many more seeds or prompts find a difference of `margin` with a probability of POWER."""
        seeds, prompts = self.shape
        ways = []
        if seeds > 1 and (more := _least(lambda n: self._power_of(seeds + n, prompts), MOST_SEEDS)):
            ways.append(f"{more} more seeds of each")
        if more := _least(lambda n: self._power_of(seeds, prompts + n), MOST_PROMPTS):
            ways.append(f"{more} more prompts")
        return f"needs {' or '.join(ways) or 'more seeds and more prompts'}"

    def _power_of(self, seeds: int, prompts: int) -> float:
        of_prompts, of_seeds, noise = self.variances
        variance = of_prompts / prompts + of_seeds / seeds + noise / seeds / prompts
        freedom = 2.0 * (seeds - 1) if of_seeds else prompts - 1.0
        return power_at(self.margin, float(np.sqrt(variance)), freedom)


def compare(a: np.ndarray, b: np.ndarray, *, margin: float = 0.02) -> Comparison:
    """Compare two arms, float64 [S_a, P] and [S_b, P] with P >= 2, whose columns are the same prompts.

    margin: the smallest difference that matters, in the unit of the values.
    """
    prompts, seeds = a.shape[1], min(len(a), len(b))
    paired = b.mean(axis=0) - a.mean(axis=0)
    of_prompts = float(paired.var(ddof=1)) / prompts
    several = [arm for arm in (a, b) if seeds > 1]
    of_seeds = [float(arm.mean(axis=1).var(ddof=1)) / len(arm) for arm in several]
    noise = sum(_residual(arm) / arm.size for arm in several)
    total = max(of_prompts + sum(of_seeds) - noise, of_prompts, sum(of_seeds))
    squares = of_prompts**2 / (prompts - 1)
    squares += sum(value**2 / (len(arm) - 1) for value, arm in zip(of_seeds, several))
    freedom = round(total**2 / squares if squares else prompts - 1.0, 1)
    error, difference = float(np.sqrt(total)), float(paired.mean())
    wider = critical(freedom) / critical(prompts - 1.0)
    below, above = _bootstrap(paired)
    return Comparison(
        difference=difference,
        low=difference - wider * above * error,
        high=difference - wider * below * error,
        power=power_at(margin, error * _inverse_bias(freedom), freedom),
        margin=margin,
        shape=(seeds, prompts),
        variances=(
            prompts * max(of_prompts - noise, 0.0),
            seeds * max(sum(of_seeds) - noise, 0.0),
            prompts * seeds * noise,
        ),
    )


@functools.lru_cache
def critical(freedom: float) -> float:
    """Return the quantile 1 - ALPHA / 2 of the t distribution."""
    normal, scale = _draws(freedom)
    return float(np.quantile(np.abs(normal) / scale, 1 - ALPHA))


def power_at(difference: float, error: float, freedom: float) -> float:
    """Return the probability that a true difference is found, with a standard error of `error`."""
    if error == 0:
        return 1.0
    normal, scale = _draws(freedom)
    return float((np.abs(difference / error + normal) / scale > critical(freedom)).mean())


@functools.lru_cache(maxsize=64)
def _draws(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Return a numerator and a denominator of draws from a t distribution, float64 [DRAWS] each."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(DRAWS)
    return normal, np.sqrt(rng.chisquare(max(freedom, 1.0), DRAWS) / max(freedom, 1.0))


def _inverse_bias(freedom: float) -> float:
    """Return how much 1 / error exceeds the true inverse on average; without it power would be overstated."""
    half = max(freedom, 1.5) / 2
    return math.sqrt(half) * math.exp(math.lgamma(half - 0.5) - math.lgamma(half))


def _residual(arm: np.ndarray) -> float:
    """Return the variance within an arm [S, P] that neither its seeds nor its prompts explain."""
    rest = arm - arm.mean(axis=0) - arm.mean(axis=1, keepdims=True) + arm.mean()
    return float((rest**2).sum() / (arm.shape[0] - 1) / (arm.shape[1] - 1))


def _bootstrap(paired: np.ndarray) -> tuple[float, float]:
    """Return the quantiles ALPHA / 2 and 1 - ALPHA / 2 of the studentised mean over resampled prompts."""
    count = len(paired)
    if not paired.var():
        return 0.0, 0.0
    weights = _weights(count)
    means = weights @ paired
    errors = np.sqrt(np.maximum(weights @ paired**2 - means**2, 0.0) / (count - 1))
    ratios = (means[errors > 0] - paired.mean()) / errors[errors > 0]
    below, above = np.quantile(ratios, [ALPHA / 2, 1 - ALPHA / 2])
    return float(below), float(above)


@functools.lru_cache(maxsize=4)
def _weights(count: int) -> np.ndarray:
    """Return the share of each of `count` prompts in each bootstrap sample, float64 [ROUNDS, count]."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), ROUNDS) / count


def _least(power_of: Callable[[int], float], most: int) -> int | None:
    """Return the smallest n in [1, most] with a power of POWER, which grows with n; None if there is none."""
    if power_of(most) < POWER:
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle) >= POWER else (middle, high)
    return high
