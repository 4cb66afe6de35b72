"""Comparisons of log-probs with what their own noise allows, for errors of the size of rounding.

The bound of `rl.checks.logprobs` holds for every model, so in bfloat16 it is far above the noise of most.
Here the noise is that of other tokens of the run: of the other ranks, of earlier steps, and of the draw
itself. Sums fade by FADE per step, so that an error which begins late is not diluted.
"""

import math
from collections import defaultdict

import torch
from torch import Tensor

from rl.checks.batches import RISK, CheckFailed
from rl.checks.logprobs import LogprobMismatch
from rl.data.batch import Batch
from rl.objectives.segments import segment_sum

FADE = 0.95
"""Weight of a step's sums one step later."""
FLOOR = 1e-3
"""Differences below this share of the bound of rounding count as equal to it."""
MIN_SAMPLES = 32
"""Minimum number of samples of a rank, and of all others, that are compared."""
ENTROPY_SLACK = 8
"""Rounding may shift the mean of -log q from the entropy by the bound of log-probs divided by this."""
DEVIATIONS = 9.0
"""Standard errors by which a rank differs; the log of a sample's mean gap has lighter tails than a normal
distribution, whose tail is 1e-19 there."""
MIN_FACTOR = 2.0
"""Factor by which the gaps of a rank must exceed those of the others: ranks may have other devices."""
SLOPE = 0.3
"""Share of the distance from the reference by which engine and trainer may differ systematically."""
MIN_DISTANCE = 1.5
"""Minimum of the squared distance from the reference in units of the squared gaps; that of noise is 1.25."""
JUMP, MIN_STEPS = 3.0, 5
"""A mean gap above JUMP times the median of at least MIN_STEPS earlier steps is logged as a warning."""


class DrawnEntropy:
    """Compares the log-probs of sampled tokens with the entropy of the distribution they are said to be from.

    The expectation of -log q(x) of a token x drawn from q is the entropy of q. The differences are those of a
    martingale M, for which P(|M| >= z sqrt([M] + <M>)) <= 2 exp(-z^2 / 2) (Bercu and Touati, 2008); the
    conditional <M> is taken to be the observed [M]. Samples from another temperature or a truncated
    distribution exceed it.
    """

    def __init__(self):
        self._sum = self._squares = self._count = 0.0

    def check(self, batch: Batch, entropy: Tensor, counted: Tensor, *, slack: float) -> None:
        """Raise CheckFailed if the tokens were not drawn from the engine's distribution.

        entropy: the trainer's, float32 [T]. counted: bool [T], the tokens that the present weights sampled.
        slack: mean difference that rounding may cause, in nats.
        """
        assert batch.rollout_logprobs is not None
        found = (-batch.rollout_logprobs - entropy)[counted].double()
        self._sum = FADE * self._sum + float(found.sum())
        self._squares = FADE**2 * self._squares + float(found.square().sum())
        self._count = FADE * self._count + len(found)
        limit = math.sqrt(-4 * math.log(RISK / 2) * self._squares) + slack * self._count
        if abs(self._sum) > limit:
            raise CheckFailed(
                f"entropy check: over the last {self._count:.0f} sampled tokens the mean of -log q is "
                f"{self._sum / self._count:+.3g} nats from the entropy of q, more than chance explains "
                f"({limit / self._count:.2g}, probability below {RISK:g}): the tokens were drawn from "
                "another distribution than the one whose log-probs the engine reports. Temperature, "
                "penalties or truncation differ."
            )


class Gaps:
    """Differences of log-probs between engine and trainer, by rank and over the steps of a run."""

    def __init__(self):
        self._sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._earlier: list[float] = []

    def check(self, gaps: Tensor, ranks: dict[str, Tensor], *, limit: float) -> None:
        """Raise LogprobMismatch if the gaps of one rank are larger than those of the others.

        gaps: mean difference of each sample's tokens, float64 [n]. ranks: kind of rank -> rank of each
        sample, int64 [n]. limit: bound of rounding, which is the unit of what counts as equal.
        """
        logs = (gaps + FLOOR * limit).log()
        logs = logs - logs.mean() if len(logs) else logs
        for sums in self._sums.values():
            sums[:] = [FADE * value for value in sums]
        for kind, of in ranks.items():
            for rank in of.unique().tolist():
                own, sums = logs[of == rank], self._sums[kind, rank]
                for k, value in enumerate((len(own), own.sum(), own.square().sum())):
                    sums[k] += float(value)
            self._compare(kind, limit)

    def _compare(self, kind: str, limit: float) -> None:
        members = {rank: sums for (of, rank), sums in self._sums.items() if of == kind}
        for rank, (count, total, squares) in members.items():
            rest = [sum(sums[k] for other, sums in members.items() if other != rank) for k in range(3)]
            if min(count, rest[0]) < MIN_SAMPLES:
                continue
            mean, mean_of_rest = total / count, rest[1] / rest[0]
            variances = squares / count - mean**2, rest[2] / rest[0] - mean_of_rest**2
            error = math.sqrt(max(0.0, variances[0]) / count + max(0.0, variances[1]) / rest[0])
            if mean - mean_of_rest > max(DEVIATIONS * error, math.log(MIN_FACTOR)):
                factor, deviations = math.exp(mean - mean_of_rest), (mean - mean_of_rest) / max(error, 1e-9)
                raise LogprobMismatch(
                    f"the log-probs of engine and trainer differ {factor:.1f} times as much in samples that "
                    f"rank {rank} {kind} as in those of other ranks, {deviations:.0f} standard errors over "
                    f"{count:.0f} samples, although all are below the bound of rounding ({limit:.2g}): "
                    "weights, cache, adapters or sampling of this rank differ from the others'."
                )

    def jump(self, mean: float) -> str:
        """Return a warning if the mean gap of a step is far above those of earlier steps; "" otherwise."""
        earlier = sorted(self._earlier[-20:])
        self._earlier = [*self._earlier[-19:], mean]
        if len(earlier) < MIN_STEPS or mean <= JUMP * (median := earlier[len(earlier) // 2]) or not median:
            return ""
        return (
            f"warning: log-prob check: engine and trainer differ by {mean:.2g} nats per token, "
            f"{mean / median:.1f} times as much as in the last {len(earlier)} steps. Something that one of "
            "them computes with has changed."
        )


def check_direction(batch: Batch, counted: Tensor) -> None:
    """Raise LogprobMismatch if engine and trainer differ along the policy's distance from the reference.

    An adapter that the engine applies with another scale, or weights that are a mixture of both, shift the
    log-probs in proportion to that distance, by less than the bound of rounding as long as the policy has
    learned little. counted: bool [T], the tokens that the present weights sampled. Samples are the units of
    the standard error.
    """
    assert batch.rollout_logprobs is not None and batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    gaps = torch.where(counted, batch.old_logprobs - batch.rollout_logprobs, 0.0).double()
    # With the mean of both sides the noise of neither has a part in the slope.
    distance = (batch.old_logprobs + batch.rollout_logprobs) / 2 - batch.ref_logprobs
    distance = torch.where(counted, distance, 0.0).double()
    products = segment_sum(gaps * distance, batch.lengths)
    squares = segment_sum(distance.square(), batch.lengths)
    total = float(squares.sum())
    if len(batch) < MIN_SAMPLES or total < MIN_DISTANCE * float(gaps.square().sum()):
        return  # the distance is noise itself
    slope = float(products.sum()) / total
    error = float((products - slope * squares).square().sum().sqrt()) / total
    if abs(slope) > max(SLOPE, DEVIATIONS * error):
        raise LogprobMismatch(
            f"engine and trainer differ by {-slope:+.2f} times the policy's distance from the reference "
            f"({abs(slope) / max(error, 1e-9):.0f} standard errors), which rounding does not: the engine "
            "applies adapters with another scale, or some weights of another version."
        )
