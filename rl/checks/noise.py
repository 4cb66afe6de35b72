"""Statistical comparisons of log-probs. They detect systematic errors as small as rounding errors.

The bound of `rl.checks.logprobs` holds for every model. Therefore, in bfloat16, it is far above the noise of
most models. Here the noise is estimated from the tokens of other ranks, from earlier steps, and from the
variance of sampling itself. For example, `Gaps.check` compares the samples that one rank generated with the
samples of the other ranks. All sums decay by the factor FADE per step, so that an error that appears late is
not diluted.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rl.checks.batches import RISK, CheckFailed
from rl.checks.logprobs import LogprobMismatch
from rl.data.batch import Batch
from rl.objectives.segments import segment_sum

FADE = 0.95
"""Factor by which the sums decay in each step."""
FLOOR = 1e-3
"""Share of the bound of rounding that is added to a gap before its logarithm is taken, because a gap may be
0."""
MIN_UNITS = 32
"""Minimum number of prompts that a rank, and that all other ranks together, must have to be compared."""
MIN_PROMPTS = 16
"""Minimum number of prompts, of one or more steps, whose gaps are compared with the distance from the
reference."""
SMALL_VOCABULARY = 4096
"""Vocabulary below which `DrawnEntropy` cuts as for this one."""
ENTROPY_SLACK = 8
"""Divisor of the bound for log-probs: the mean of -log q may differ from the entropy by the quotient."""
DEVIATIONS = 9.0
"""Number of standard errors above which a rank counts as different. The tail of a normal distribution is
1e-19 there, and the logarithm of a sample's mean gap has lighter tails."""
MIN_FACTOR = 2.0
"""Factor by which a rank's gaps must also exceed the gaps of other ranks, because ranks may have different
devices."""
POSITION_FACTOR = 4.0
"""Factor by which gaps at some positions must also exceed the gaps at others, because rounding depends on the
context."""
MAX_PROBABILITY = 0.75
"""Maximum probability of tokens that are compared by rank and by position. For a more probable token, the
rounding error of the log-softmax exceeds the error of the logits, and it is not in proportion to 1 - p."""
UNITS = {
    "generated": "samples that rank {} generated as in those of other ranks",
    "trained on": "samples that rank {} trained on as in those of other ranks",
    "position": "tokens at positions from 2 ** {} up to its double as at others",
}
"""Kind of rank or position -> the compared samples or tokens, for the message."""
SLOPE = 0.3
"""Largest tolerated systematic difference between engine and trainer, as a share of the policy's distance
from the reference."""
MIN_DISTANCE = 1.5
"""Minimum squared distance from the reference, in units of the squared gaps. Noise alone gives 1.25."""
NEARER = 4.0
"""Largest ratio of the engine's squared distance from the policy to its squared distance from the reference.
If the policy has not moved, the ratio is at most 2, even if the reference has no noise."""
JUMP, MIN_STEPS = 3.0, 5
"""A mean gap above JUMP times the median of at least MIN_STEPS earlier steps is logged as a warning."""


class DrawnEntropy:
    """Compares the log-probs of sampled tokens with the entropy of their distribution.

    If a token x is drawn from q, the expectation of -log q(x) is the entropy H of q. With -log q cut off at
    b, the sum of the differences is a martingale. Its terms are at most b, and their conditional variances
    are at most b H. Let V be the sum of b H. By Freedman's inequality (1975) the sum exceeds a with a
    probability of at most exp(-a^2 / (2 (V + a b / 3))). For example, samples with another temperature or
    from a truncated distribution exceed this bound.

    vocab_size: number V of tokens of the vocabulary. It determines b. The cut at b lowers the mean by at most
        V b exp(-b). With a small vocabulary this hides small errors, so a larger b is tried, too.
    """

    def __init__(self, vocab_size: int):
        cuts = {2 * math.log(size) for size in (vocab_size, max(vocab_size, SMALL_VOCABULARY))}
        self._lost = {cut: vocab_size * cut * math.exp(-cut) for cut in cuts}
        self._sums = dict.fromkeys(cuts, np.zeros(3))
        """Sum of the differences, sum of the entropies, and number of tokens, float64 [3], for each b."""

    def check(self, batch: Batch, entropy: Tensor, counted: Tensor, *, slack: float) -> None:
        """Raise CheckFailed if the tokens were not drawn from the engine's distribution.

        entropy: entropy by the trainer, float32 [T]. counted: tokens sampled by the present weights, bool
            [T].
        slack: mean difference that rounding may cause, in nats.
        """
        assert batch.rollout_logprobs is not None
        own = entropy[counted].double().clamp(min=0.0)
        surprise = -batch.rollout_logprobs[counted].double()
        for cut, lost in self._lost.items():
            step = np.array([float((surprise.clamp(max=cut) - own).sum()), float(own.sum()), len(own)])
            self._sums[cut] = step + self._sums[cut] * (FADE, FADE**2, FADE)
            for total, entropies, count in (step, self._sums[cut]):
                first = -math.log(RISK / 2) * cut / 3
                limit = first + math.sqrt(first**2 - 2 * math.log(RISK / 2) * cut * entropies)
                limit += (slack + (lost if total < 0 else 0.0)) * count
                if abs(total) > limit:
                    raise CheckFailed(
                        f"entropy check: over the last {count:.0f} sampled tokens the mean of -log q is "
                        f"{total / count:+.3g} nats from the entropy of q, more than chance explains "
                        f"({limit / count:.2g}, probability below {RISK:g}): the tokens were drawn from "
                        "another distribution than the one whose log-probs the engine reports. Temperature, "
                        "penalties or truncation differ."
                    )


class Gaps:
    """Gaps, which are differences of log-probs between engine and trainer, by rank and over the steps of a
    run."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, np.ndarray]] = {}
        """Kind of rank -> rank -> number of units, sum of the logarithms of their gaps, and sum of the
        squares of these logarithms."""
        self._earlier: list[float] = []

    def check(self, batch: Batch, counted: Tensor, ranks: dict[str, Tensor], *, limit: float) -> None:
        """Raise LogprobMismatch if the gaps of one rank are larger than the gaps of the other ranks.

        The samples of one prompt on one rank count as one unit. A policy that is sure of its answers samples
        the same tokens again and again, and equal tokens after equal contexts have equal gaps.

        counted: bool [T], the tokens that are compared. ranks: kind of rank -> rank of each sample, int64
        [n]. limit: bound of rounding; FLOOR times the limit is added to every gap.
        """
        self._add(
            {
                kind: self._units(batch, counted, of.repeat_interleave(batch.lengths), limit)
                for kind, of in ranks.items()
            },
            limit,
        )

    def check_positions(self, batch: Batch, counted: Tensor, *, limit: float) -> None:
        """Raise LogprobMismatch if the gaps of tokens at some positions are larger than at the others.

        Positions count from the first token of the prompt and are grouped by their binary logarithm. For
        example, positions 8 to 15 are one group. The tokens of one prompt's samples in one group count as one
        unit.

        counted, limit: as in `check`.
        """
        starts = (batch.prompt_lengths - batch.offsets[:-1]).repeat_interleave(batch.lengths)
        octaves = (torch.arange(len(counted)) + starts + 1).log2().long()
        self._add({"position": self._units(batch, counted, octaves, limit)}, limit)

    @staticmethod
    def _units(batch: Batch, counted: Tensor, labels: Tensor, limit: float) -> tuple[Tensor, Tensor]:
        """Return the logarithm of the gap of each unit, float64 [u], and its label, int64 [u].

        A unit is all compared tokens of one prompt with one label. If a token has the probability p, an error
        of the logits moves its log-prob in proportion to 1 - p, within a factor of sqrt(2). The gaps of a
        unit are therefore divided by its sum of 1 - p, and tokens above MAX_PROBABILITY are left out.

        labels: int64 [T].
        """
        assert batch.rollout_logprobs is not None and batch.old_logprobs is not None
        counted = counted & (batch.rollout_logprobs <= math.log(MAX_PROBABILITY))
        prompts = batch.groups.repeat_interleave(batch.lengths)[counted]
        units, member_of = torch.stack((prompts, labels[counted])).unique(dim=1, return_inverse=True)
        terms = torch.stack(
            (
                (batch.old_logprobs - batch.rollout_logprobs).abs()[counted].double() + FLOOR * limit,
                -torch.expm1(batch.rollout_logprobs[counted].double()),
            )
        )
        gaps, sizes = torch.zeros(2, units.shape[1], dtype=torch.float64).index_add_(1, member_of, terms)
        return (gaps / sizes).log(), units[1]

    def _add(self, units: dict[str, tuple[Tensor, Tensor]], limit: float) -> None:
        """Add the units of a step to the sums, and compare. units: kind -> `_units`."""
        found = list[tuple[float, str]]()
        for kind, (logs, of) in units.items():
            logs, step = logs - logs.mean() if len(logs) else logs, {}
            for label in of.unique().tolist():
                own = logs[of == label]
                step[label] = np.array([len(own), float(own.sum()), float(own.square().sum())])
            earlier = self._sums.get(kind, {})
            faded = {r: FADE * earlier.get(r, 0.0) + step.get(r, np.zeros(3)) for r in earlier | step}
            self._sums[kind] = faded
            for members in (step, faded):
                found += self._compare(kind, members, limit)
        if found:  # several may be found: for example, one rank may train on the samples of a wrong engine
            raise LogprobMismatch(max(found)[1])

    @staticmethod
    def _compare(kind: str, members: dict[int, np.ndarray], limit: float) -> Iterator[tuple[float, str]]:
        """Yield for each rank with larger gaps than the other ranks: the number of standard errors, and a
        message."""
        for rank, own in members.items():
            rest = sum(members.values()) - own
            if min(own[0], rest[0]) < MIN_UNITS:
                continue
            (mean, spread), (mean_of_rest, spread_of_rest) = (
                (sums[1] / sums[0], max(0.0, sums[2] / sums[0] - (sums[1] / sums[0]) ** 2))
                for sums in (own, rest)
            )
            error = math.sqrt(spread / own[0] + spread_of_rest / rest[0])
            minimum = math.log(POSITION_FACTOR if kind == "position" else MIN_FACTOR)
            if mean - mean_of_rest > max(DEVIATIONS * error, minimum):
                factor, deviations = math.exp(mean - mean_of_rest), (mean - mean_of_rest) / max(error, 1e-9)
                yield (
                    deviations,
                    f"the log-probs of engine and trainer differ {factor:.1f} times as much in "
                    f"{UNITS[kind].format(rank)}, {deviations:.0f} standard errors over "
                    f"{own[0]:.0f} prompts, although all are below the bound of rounding "
                    f"({limit:.2g}): weights, cache, positions, adapters or sampling are other ones there.",
                )

    def jump(self, mean: float) -> str:
        """Return a warning if the mean gap of a step is far above the gaps of earlier steps; "" otherwise."""
        earlier = sorted(self._earlier[-20:])
        self._earlier = [*self._earlier[-19:], mean]
        if len(earlier) < MIN_STEPS or mean <= JUMP * (median := earlier[len(earlier) // 2]) or not median:
            return ""
        return (
            f"warning: log-prob check: engine and trainer differ by {mean:.2g} nats per token, "
            f"{mean / median:.1f} times as much as in the last {len(earlier)} steps. Something that one of "
            "them computes with has changed."
        )


class Direction:
    """Compares the differences of engine and trainer with the policy's distance from the reference.

    For example, if an engine applies the adapter with another scale, its log-probs are shifted in proportion
    to this distance. The same is true for an engine whose weights mix the policy and the reference. As long
    as the policy has learned little, the shift is below the bound of rounding. The standard error is computed
    over prompts, because the samples of one prompt may be equal.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Tensor] = {}
        """Version of the policy -> sums of its prompts, float64 [4, prompts], not compared yet."""

    def check(self, batch: Batch, counted: Tensor, *, version: int) -> None:
        """Raise LogprobMismatch if engine and trainer differ along the policy's distance from the reference.

        The prompts of a step with fewer than MIN_PROMPTS wait for the prompts of the next steps.

        counted: bool [T], the tokens that the present weights sampled. version: the policy's.
        """
        assert batch.rollout_logprobs is not None and batch.old_logprobs is not None
        assert batch.ref_logprobs is not None
        own, engine = batch.old_logprobs, batch.rollout_logprobs
        # The distance is taken from the mean of engine and trainer, so that neither side's noise adds to the
        # slope.
        differences = own - engine, (own + engine) / 2 - batch.ref_logprobs, engine - batch.ref_logprobs
        gaps, distance, of_reference = (torch.where(counted, each, 0.0).double() for each in differences)
        terms = gaps * distance, distance.square(), gaps.square(), of_reference.square()
        self._waiting[version] = torch.stack([_by_prompt(batch, each) for each in terms])
        products, squares, far, near = torch.cat(list(self._waiting.values()), dim=1)
        if len(squares) >= MIN_PROMPTS:
            self._waiting.clear()
            _check_direction(products, squares, far, near)


def _check_direction(products: Tensor, squares: Tensor, far: Tensor, near: Tensor) -> None:
    """Raise LogprobMismatch as `Direction.check` does.

    Sums over the tokens of each prompt, float64 [prompts]. products: gap * distance. squares: distance ** 2.
    far: gap ** 2, the engine's squared distance from the policy. near: from the reference.
    """
    logs = (far / near)[(far > 0) & (near > 0)].log()
    error = float(logs.std()) / len(logs) ** 0.5 if len(logs) >= MIN_PROMPTS else math.inf
    if float(logs.mean()) - DEVIATIONS * error > math.log(NEARER):
        raise LogprobMismatch(
            f"the engine's log-probs are {math.exp(float(logs.mean()) / 2):.1f} times nearer to those of "
            f"the reference than to the policy's, over {len(logs)} prompts: the engine generates without "
            "what the policy has learned, such as its adapter."
        )
    total = float(squares.sum())
    if total <= MIN_DISTANCE * float(far.sum()):
        return  # the distance is noise
    slope = float(products.sum()) / total
    error = float((products - slope * squares).square().sum().sqrt()) / total
    if abs(slope) > max(SLOPE, DEVIATIONS * error):
        raise LogprobMismatch(
            f"engine and trainer differ by {-slope:+.2f} times the policy's distance from the reference "
            f"({abs(slope) / max(error, 1e-9):.0f} standard errors), which rounding does not: the engine "
            "applies adapters with another scale, or some weights of another version."
        )


def _by_prompt(batch: Batch, values: Tensor) -> Tensor:
    """Return the sum of the tokens' values over the samples of each prompt. values: float64 [T]."""
    by_sample = segment_sum(values, batch.lengths)
    numbers = batch.groups.unique(return_inverse=True)[1]
    return torch.zeros(int(numbers.max()) + 1, dtype=values.dtype).index_add_(0, numbers, by_sample)
