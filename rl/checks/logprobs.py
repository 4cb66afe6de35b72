"""Compares log-probs of engine, trainer and reference. If all are right, they differ only by rounding."""

from collections.abc import Callable
from math import inf, sqrt

import torch
from torch import Tensor

from rl.checks.batches import token_place
from rl.data.batch import Batch
from rl.objectives.segments import segment_sum
from rl.training.micro_batch_plans import MicroBatchPlan, samples_of

PRODUCTS_PER_LAYER = 6
"""Number of consecutive matrix products in a layer: QKV, scores, weighted sum, output projection, two in the
MLP."""
SLACK = 4
"""Factor for the tail of the distribution of a sum of rounding errors."""
NUM_EQUAL = 32
"""Number of tokens whose log-probs do not stay equal by chance after an update that moved weights."""
FP8_FACTOR = 4
"""Factor by which the limit grows if the engine's weights are in FP8, with a relative error of 2.5 % (root
mean square). With rounded activations, a product errs by 2.3 times SLACK * 2^-8, the limit in bfloat16."""


class LogprobMismatch(RuntimeError):
    """Raised on every rank if log-probs differ by more than rounding explains."""


class NumericsDiffer(RuntimeError):
    """Raised on every rank if a log-prob of the trainer is not bitwise equal to the engine's."""


def rounding_limit(hf: dict, dtype: torch.dtype) -> float:
    """Return the limit of the mean difference of log-probs, relative to their mean size.

    The rounding errors of consecutive sums of n terms add up to about sqrt(n) * eps / 2 times the largest
    logit (Higham and Mary, 2019). In bfloat16 a product is summed in float32 and rounded once.

    hf: content of the model's config.json.
    """
    width = hf["hidden_size"] if dtype is torch.float32 else 1
    terms = (PRODUCTS_PER_LAYER * hf["num_hidden_layers"] + 1) * width
    return SLACK * sqrt(terms) * torch.finfo(dtype).eps / 2


def present_tokens(batch: Batch, version: int, *, whole: bool) -> Tensor:
    """Return which counted tokens the engine sampled with the present weights, bool [T].

    version: version of the trainer's weights. whole: whether all tokens of a sample are left out if one of
        them is older. This is needed if the engine computed the later tokens from a cache of older weights.
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
    noise: float = inf,
    routes: bool,
    ranks: list[list[int]],
    explain: Callable[[float], str] = lambda limit: "",
) -> dict[str, float]:
    """Return the mean difference of the engine's log-probs from the trainer's, and its limit, as metrics.

    The difference is taken relative to the mean size of the log-probs, or to 1 nat if this is larger. Raises
    LogprobMismatch if the difference exceeds the limit.

    Args:
        logprobs: log-probs of the trainer, float32 [T].
        counted: the tokens that are compared (`present_tokens`), bool [T].
        limit: the largest mean difference (`rounding_limit`), relative to the size of log-probs.
        noise: the largest mean difference according to the measured noise (`rl.checks.rounding`), in nats.
        routes: whether the model routes tokens to experts. If so, the sample with the largest difference is
            left out, because a rounding error may route one of its tokens to another expert.
        ranks: the samples of each data parallel rank of the trainer, for the message.
        explain: function of the limit, in nats, that returns sentences about the cause for the message.
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
    """Raise LogprobMismatch if policy and reference differ, although the policy has not learned yet.

    limit: the largest mean difference (`rounding_limit`).
    """
    if batch.ref_logprobs is None or batch.old_logprobs is None:
        return
    gaps = torch.where(batch.mask > 0, (batch.old_logprobs - batch.ref_logprobs).abs().double(), 0.0)
    mean = float(gaps.sum() / batch.mask.sum().clamp(min=1))
    if mean > limit * max(1.0, float(batch.ref_logprobs.abs().mean())):
        raise LogprobMismatch(
            f"before the first update the log-probs of policy and reference differ by {mean:.2g} nats in the "
            "mean over tokens, but both are the model that the run started from: their weights differ, or a "
            "pass is random (dropout)."
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

    version: version of the policy that learns from the batch. plans: the mini-batches, from which the rank of
    a sample is known. replayed: run whose samples are replayed (`run.rollouts`).
    """
    logprobs, engines = batch.column("old_logprobs"), batch.column("rollout_logprobs")
    differ = (logprobs != engines) & (batch.mask > 0)
    if not differ.any():
        return
    first = int(differ.nonzero()[0])
    sample, versions = int((batch.offsets[1:] <= first).sum()), batch.weight_versions
    by_rank = [(rank, samples_of([micros])) for plan in plans for rank, micros in enumerate(plan)]
    holder = next(rank for rank, samples in by_rank if sample in samples)
    remedy = "Use model.numerics=fast, or compare the libraries and processors of the ranks."
    if replayed and version:
        remedy = (
            f"In run.mode=train_only the weights of version {version} are those of run.rollouts={replayed} "
            "only if no key that changes an update, such as training.optimizer.lr, differs. Compare the "
            "config.yaml of both runs, or use model.numerics=fast."
        )
    raise NumericsDiffer(
        f"model.numerics=bitwise: {int(differ.sum())} of {int((batch.mask > 0).sum())} sampled tokens have "
        f"another log-prob in the trainer than in the engine. The first one is {token_place(batch, first)}: "
        f"{float(logprobs[first])!r} in the trainer (data parallel rank {holder}, weights of version "
        f"{version}), {float(engines[first])!r} in the engine (version "
        f"{'unknown' if versions is None else int(versions[first])}). {remedy}"
    )
