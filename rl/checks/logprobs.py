"""Compares log-probs of engine, trainer and reference. If all are right, they differ only by rounding."""

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rl.checks.batches import RISK, CheckFailed, refuse, token_place
from rl.data.batch import Batch
from rl.objectives.segments import segment_sum
from rl.training.micro_batch_plans import MicroBatchPlan, samples_of

PRODUCTS_PER_LAYER = 6
"""Consecutive matrix products in a layer: QKV, scores, weighted sum, output projection, two in the MLP."""
SLACK = 4
"""Factor for the tail of the distribution of a sum of rounding errors."""
NUM_EQUAL = 32
"""Number of tokens whose log-probs do not stay equal by chance after an update that moved weights."""
NUM_KEYED = 32
"""Number of tokens of a response by which earlier samples are found that may be equal to it."""
FP8_FACTOR = 4
"""Factor of the limit in FP8, where products with rounded activations err by 2.3 times SLACK * 2^-8."""
FADE = 0.95
"""Factor by which the sums decay in each step, so that an error that appears late is not diluted."""
SMALL_VOCABULARY = 4096
"""Vocabulary below which `DrawnEntropy` cuts as for this one."""
ENTROPY_SLACK = 8
"""Divisor of the bound for log-probs: the mean of -log q may differ from the entropy by the quotient."""


class LogprobMismatch(RuntimeError):
    """Raised on every rank if log-probs differ by more than rounding explains."""


class NumericsDiffer(RuntimeError):
    """Raised on every rank if a log-prob of the trainer is not bitwise equal to the engine's."""


def rounding_limit(hf: dict, dtype: torch.dtype) -> float:
    """Return the limit of the mean difference of log-probs, relative to their mean size.

    Errors of consecutive sums of n terms add up to about sqrt(n) * eps / 2 times the largest logit (Higham
    and Mary, 2019). In bfloat16 a product is summed in float32 and rounded once. hf: the model's config.json.
    """
    width = hf["hidden_size"] if dtype is torch.float32 else 1
    terms = (PRODUCTS_PER_LAYER * hf["num_hidden_layers"] + 1) * width
    return SLACK * math.sqrt(terms) * torch.finfo(dtype).eps / 2


def present_tokens(batch: Batch, version: int, *, whole: bool) -> Tensor:
    """Return which counted tokens the engine sampled with the present weights, bool [T].

    version: of the trainer's weights. whole: whether a sample with an older token is left out.
    """
    assert batch.mask is not None
    counted = batch.mask > 0
    if batch.weight_versions is not None:
        is_present = batch.weight_versions == version
        if whole:
            older = segment_sum((~is_present & counted).double(), batch.lengths)
            is_present = (older == 0).repeat_interleave(batch.lengths)
        counted &= is_present
    return counted


def check_engine(
    batch: Batch,
    logprobs: Tensor,
    counted: Tensor,
    *,
    limit: float,
    noise: float = math.inf,
    routes: bool,
    ranks: list[list[int]],
    explain: Callable[[float], str] = lambda limit: "",
) -> dict[str, float]:
    """Return the mean difference of the engine's log-probs from the trainer's, and its limit, as metrics.

    Raises LogprobMismatch above `limit`, relative to the mean size of log-probs (at least 1 nat), or above
    `noise`, in nats. logprobs: of the trainer, float32 [T]. counted: the compared tokens, bool [T]. routes:
    whether the sample with the largest difference is left out, because a rounding error may send its tokens
    to other experts. ranks: the samples of each data parallel rank. explain: function of the limit, in nats,
    that returns sentences about the cause.
    """
    engines = batch.column("rollout_logprobs")
    gaps = torch.where(counted, (logprobs - engines).abs().double(), 0.0)
    by_sample, counts = segment_sum(gaps, batch.lengths), segment_sum(counted.double(), batch.lengths)
    kept = counts > 0
    if routes and kept.sum() > 1:
        kept[int((by_sample / counts.clamp(min=1)).argmax())] = False
    if not kept.any():
        return {}
    size = float(torch.where(counted, engines.abs(), 0.0).sum() / counted.sum())
    mean, limit = float(by_sample[kept].sum() / counts[kept].sum()), limit * max(1.0, size)
    explained, worst = min(limit, noise), int(gaps.argmax())
    if mean <= explained:
        return {"training/logprob_gap": mean, "training/logprob_gap_limit": limit}
    per_rank = [float(by_sample[mine].sum() / counts[mine].sum().clamp(min=1)) for mine in ranks]
    by_rank = ", ".join(f"rank {rank} {gap:.2g}" for rank, gap in enumerate(per_rank))
    raise LogprobMismatch(
        f"the engine's log-probs differ from the trainer's by {mean:.2g} nats in the mean over tokens, more "
        f"than rounding explains ({explained:.2g}); by data parallel rank of the trainer: {by_rank}; largest "
        f"at {token_place(batch, worst)}: engine {float(engines[worst]):.4g}, trainer "
        f"{float(logprobs[worst]):.4g}. {explain(explained)} If the engine computes in another precision, "
        "raise agreement.logprob_slack."
    )


def check_reference(batch: Batch, *, limit: float) -> None:
    """Raise LogprobMismatch if policy and reference differ before the policy learns. limit: as above."""
    if batch.ref_logprobs is None or batch.old_logprobs is None:
        return
    gaps = torch.where(batch.mask > 0, (batch.old_logprobs - batch.ref_logprobs).abs().double(), 0.0)
    mean = float(gaps.sum() / batch.mask.sum().clamp(min=1))
    if mean > limit * max(1.0, float(batch.ref_logprobs.abs().mean())):
        raise LogprobMismatch(
            f"before the first update the log-probs of policy and reference differ by {mean:.2g} nats in the "
            "mean over tokens: their weights differ, or a pass is random (dropout)."
        )


def check_moved(batch: Batch) -> None:
    """Raise LogprobMismatch if policy and reference have equal log-probs, although the policy has learned."""
    old, reference, counted = batch.old_logprobs, batch.ref_logprobs, batch.mask > 0
    if old is None or reference is None or counted.sum() <= NUM_EQUAL:
        return
    if torch.equal(old[counted], reference[counted]):
        raise LogprobMismatch(
            f"reference check: {int(counted.sum())} log-probs of the reference are exactly the policy's, "
            "although the policy has learned: one pass used the weights of the other."
        )


def check_equal(batch: Batch, version: int, plans: list[MicroBatchPlan], replayed: str = "") -> None:
    """Raise NumericsDiffer if a sampled token has another log-prob in the trainer than in the engine.

    version: of the policy. plans: the mini-batches, from which the rank of a sample is known. replayed:
    run.rollouts.
    """
    logprobs, engines = batch.column("old_logprobs"), batch.column("rollout_logprobs")
    differ = (logprobs != engines) & (batch.mask > 0)
    if not differ.any():
        return
    first = int(differ.nonzero()[0])
    sample, versions = int((batch.offsets[1:] <= first).sum()), batch.weight_versions
    by_rank = [(rank, samples_of([micros])) for plan in plans for rank, micros in enumerate(plan)]
    remedy = "Compare the libraries and processors of the ranks"
    if replayed and version:
        remedy = (
            f"The weights of version {version} are those of run.rollouts={replayed} only if no key that "
            "changes an update, such as training.optimizer.lr, differs. Compare the config.yaml of both runs"
        )
    holder = next(rank for rank, samples in by_rank if sample in samples)
    raise NumericsDiffer(
        f"model.numerics=bitwise: {int(differ.sum())} of {int((batch.mask > 0).sum())} sampled tokens have "
        f"another log-prob in the trainer than in the engine. The first one is {token_place(batch, first)}: "
        f"{float(logprobs[first])!r} in the trainer (data parallel rank {holder}, weights of version "
        f"{version}), {float(engines[first])!r} in the engine (version "
        f"{'unknown' if versions is None else int(versions[first])}). {remedy}, "
        "or use model.numerics=fast."
    )


def check_repeats(batch: Batch) -> None:
    """Raise CheckFailed if samples are equal to earlier ones of their prompt, but too improbable for RISK.

    Let each such sample of N multiply a number by 1 / (p N^2), if this is above 1. The number's expectation
    is below e, so it exceeds e / RISK with a probability below RISK (Ville's inequality).
    """
    whole, repeats, total = batch.merge_rows(), list[int](), 0.0
    mask, logprobs, offsets = whole.mask, whole.column("rollout_logprobs"), whole.offsets.tolist()
    seen = defaultdict[tuple[int, int, bytes], list[np.ndarray]](list)
    for sample, (group, ids) in enumerate(zip(whole.groups.tolist(), whole.response_ids)):
        alike = seen[group, len(ids), ids[:: len(ids) // NUM_KEYED + 1].tobytes()]
        if not any(np.array_equal(ids, other) for other in alike):
            alike.append(ids)
            continue
        span = slice(offsets[sample], offsets[sample + 1])
        terms = torch.where(mask[span] > 0, logprobs[span], 0.0).double()
        factor = -float(terms.sum()) - 2 * math.log(max(1, len(whole)))  # its logarithm
        if factor > 0:
            repeats, total = [*repeats, sample], total + factor
    if total > 1 - math.log(RISK):
        what = "{sample} is an improbable response, but an earlier sample of its prompt is the same"
        refuse("repetition", whole, repeats, what, "samples were drawn with one seed, or copied")


class DrawnEntropy:
    """If a token x is drawn from q, the expectation of -log q(x) is the entropy H of q.

    With -log q cut off at b, the sum of the differences is a martingale with terms of at most b and
    conditional variances of at most b H. Let V be the sum of b H. By Freedman's inequality (1975) the sum
    exceeds a with a probability of at most exp(-a^2 / (2 (V + a b / 3))). The cut lowers the mean by at most
    vocab_size b exp(-b). With a small vocabulary this hides small errors, so a larger b is tried, too.
    """

    def __init__(self, vocab_size: int):
        cuts = {2 * math.log(size) for size in (vocab_size, max(vocab_size, SMALL_VOCABULARY))}
        self._lost = {cut: vocab_size * cut * math.exp(-cut) for cut in cuts}
        self._sums = dict.fromkeys(cuts, np.zeros(3))
        """Sum of the differences, sum of the entropies, and number of tokens, float64 [3], for each b."""

    def check(self, batch: Batch, entropy: Tensor, counted: Tensor, *, slack: float) -> None:
        """Raise CheckFailed if the tokens were not drawn from the engine's distribution.

        entropy: by the trainer, float32 [T]. counted: bool [T]. slack: mean difference of rounding, in nats.
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
                        "another distribution."
                    )
