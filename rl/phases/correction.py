"""Rollout correction: importance weights and rejections for the mismatch between engine and trainer."""

from typing import Any, Literal

from torch import Tensor

from rl.checks.batches import check_loss_weights
from rl.config.correction import RolloutCorrection
from rl.data.batch import Batch
from rl.objectives import rollout_correction
from rl.phases.batch_metrics import token_mean


def weigh(batch: Batch, correction: RolloutCorrection, weights: Tensor | None) -> dict[str, float]:
    """Fill the column `loss_weights`; return the metrics.

    Reads old_logprobs and rollout_logprobs [T]. Both are log-probs of the same tokens under the same weights:
    the trainer computed old_logprobs, and the engine computed rollout_logprobs.
    """
    if batch.rollout_logprobs is None:
        return {}
    assert batch.old_logprobs is not None
    pair, mask, lengths = (batch.old_logprobs, batch.rollout_logprobs), batch.mask, batch.lengths
    level: rollout_correction.Level = "sequence" if correction.weighs_samples else "token"
    bound = correction.truncate_tokens or correction.truncate_samples or correction.icepop_high
    upper = bound or rollout_correction.USUAL_UPPER
    metrics = rollout_correction.metrics(*pair, lengths, mask, level=level, upper=upper)
    if weights is not None:
        batch.extra["loss_weights"] = weights
        check_loss_weights(batch, correction)
        metrics["rollout_corr/weight_mean"] = token_mean(weights, mask)
    return metrics


def weights_of(batch: Batch, logprobs: Tensor, correction: RolloutCorrection) -> Tensor | None:
    """Return `loss_weights` of a batch, [T]. logprobs: the trainer's, [T]."""
    if batch.rollout_logprobs is None:
        return None
    return loss_weights(correction, logprobs, batch.rollout_logprobs, batch.lengths, batch.mask)


def reject(batch: Batch, correction: RolloutCorrection) -> dict[str, float]:
    """Reduce `mask` as `rollout_correction.reject` configures, and keep it in a column; return the metrics.

    Reads the same columns as `weigh`.
    """
    if batch.rollout_logprobs is None or not correction.rejections:
        return {}
    assert batch.old_logprobs is not None
    pair, mask, lengths = (batch.old_logprobs, batch.rollout_logprobs), batch.mask, batch.lengths
    metrics: dict[str, float] = {}
    kept = mask
    for criterion in correction.rejections:  # each reads the mask as it was before any rejection
        options: dict[str, Any] = dict(level=criterion.level, statistic=criterion.statistic)
        options |= dict(low=criterion.low, high=criterion.high)
        passed = rollout_correction.reject(*pair, lengths, mask, **options)
        metrics |= rollout_correction.criterion_metrics(*pair, lengths, mask, passed, **options)
        kept = kept * passed
    metrics |= rollout_correction.rejection_metrics(lengths, mask, kept)
    metrics["rollout_corr/rejected_fraction"] = 1.0 - float(kept.sum() / mask.sum().clamp(min=1))
    batch.mask, batch.extra["unrejected_mask"] = kept.float(), mask
    return metrics


def loss_weights(
    correction: RolloutCorrection,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    lengths: Tensor,
    mask: Tensor,
) -> Tensor | None:
    """Return the importance weight of each token's loss [T], or None if the correction has no weights.

    A weight depends only on its own sample, so the result does not depend on how samples are split.
    """
    pair = old_logprobs, rollout_logprobs
    if upper := correction.truncate_tokens:
        return rollout_correction.token_weights(*pair, mask, upper=upper)
    if upper := correction.truncate_samples:
        return rollout_correction.sequence_weights(*pair, lengths, mask, upper=upper)
    if high := correction.icepop_high:
        level: Literal["token", "prefix", "sequence"]
        level = "sequence" if correction.icepop_level == "sample" else correction.icepop_level
        return rollout_correction.icepop(
            *pair, lengths, mask, low=correction.icepop_low, high=high, level=level
        )
    return None
