"""Rollout correction: importance weights and rejections for the mismatch between engine and trainer."""

from rl.config.schema import RolloutCorrection
from rl.data.batch import Batch
from rl.objectives import rollout_correction
from rl.phases.batch_metrics import token_mean


def correct_rollout(batch: Batch, correction: RolloutCorrection) -> dict[str, float]:
    """Fill `loss_weights` and reduce `mask` as `rollout_correction` configures; return the metrics.

    Reads old_logprobs and rollout_logprobs [T]: log-probs of the same tokens under the same weights, by the
    trainer and by the engine.
    """
    if batch.rollout_logprobs is None:
        return {}
    pair, mask, lengths = (batch.old_logprobs, batch.rollout_logprobs), batch.mask, batch.lengths
    level = "sequence" if correction.truncate_samples else "token"
    bound = correction.truncate_tokens or correction.truncate_samples or correction.icepop_high
    upper = bound or rollout_correction.USUAL_UPPER
    metrics = rollout_correction.metrics(*pair, lengths, mask, level=level, upper=upper)
    if correction.truncate_tokens:
        batch.loss_weights = rollout_correction.token_weights(*pair, mask, upper=correction.truncate_tokens)
    elif correction.truncate_samples:
        batch.loss_weights = rollout_correction.sequence_weights(
            *pair, lengths, mask, upper=correction.truncate_samples
        )
    elif correction.icepop_high:
        low, high = correction.icepop_low, correction.icepop_high
        batch.loss_weights = rollout_correction.icepop(*pair, mask, low=low, high=high)
    if batch.loss_weights is not None:
        metrics["rollout_corr/weight_mean"] = token_mean(batch.loss_weights, mask)
    kept = mask
    for criterion in correction.rejections:  # each reads the mask as it was before any rejection
        options = dict(level=criterion.level, statistic=criterion.statistic)
        options |= dict(low=criterion.low, high=criterion.high)
        passed = rollout_correction.reject(*pair, lengths, mask, **options)
        metrics |= rollout_correction.criterion_metrics(*pair, lengths, mask, passed, **options)
        kept = kept * passed
    if correction.rejections:
        metrics |= rollout_correction.rejection_metrics(lengths, mask, kept)
        metrics["rollout_corr/rejected_fraction"] = 1.0 - float(kept.sum() / mask.sum().clamp(min=1))
        batch.mask = kept.float()
    return metrics
