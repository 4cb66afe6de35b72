"""Policy losses whose probability ratio belongs to a whole sample. `rl.objectives.aggregate` turns them into one number.

Shapes: `T` response tokens of `B` samples, laid end to end; `lengths` int64 [B] says how many belong to each, zeros
allowed. Arguments, masks and statistics are those of `rl.objectives.policy_loss`. A loss depends on nothing outside of its
sample, so a mini-batch may be cut between any two samples. Means over a sample are over its unmasked tokens.
"""

import torch
from torch import Tensor

from rl.objectives.policy_loss import MAX_LOG_RATIO, Loss, masked_log_ratio, summed
from rl.objectives.segments import expand, segment_sum

MAX_LOG_SAMPLE_RATIO = 10.0
"""gspo: log of the largest ratio of a sample, as in verl. Ratios of e^10 = 22,026 mean that the policy is
lost; the bound keeps their loss finite, and beyond it the gradient is 0."""


def _mean(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean over each sample's unmasked tokens: x [T], 0 at masked positions -> [B]. 0 for a sample without any."""
    return segment_sum(x, lengths) / segment_sum(mask.to(x.dtype), lengths).clamp(min=1)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """Group Sequence Policy Optimization in its token form (GSPO-token, arXiv:2507.18071, equations 13 and 14).

        s   = exp(min(mean over the sample of (logprobs - old_logprobs), 10))
        s_t = sg(s) exp(logprobs_t - sg(logprobs_t))
        loss_t = max(-s_t A_t, -clip(s_t, 1 - clip_low, 1 + clip_high) A_t)

    Every token of a sample has the same ratio, and the clip keeps or drops all those whose advantages have one sign. With
    one advantage per sample and seq-mean-token-mean, value and gradient are those of GSPO (equation 5). The paper's bounds
    are narrow, 3e-4 and 4e-4: s is a geometric mean and moves far less than the ratio of a token.

    Args:
        logprobs, old_logprobs, advantages: floating [T].
        mask: bool or 0/1 [T].
        lengths: int64 [B].
        clip_low, clip_high: s is clipped to 1 - clip_low .. 1 + clip_high.

    Returns:
        token_loss [T] and statistics, as in `rl.objectives.policy_loss`.
            pg_clipfrac: tokens where the clipped term is the larger one, so that the gradient is cut.
    """
    mask = mask.bool()
    logprobs, old_logprobs = torch.where(mask, logprobs, 0.0), torch.where(mask, old_logprobs, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    # The mean is capped, not the tokens: one outlier among many tokens needs no cap, and the paper has none.
    log_s = expand(_mean((logprobs - old_logprobs).detach(), mask, lengths), lengths)
    ratio = (log_s + (logprobs - logprobs.detach())).clamp(max=MAX_LOG_SAMPLE_RATIO).exp()

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), summed(
        ppo_kl=-masked_log_ratio(logprobs, old_logprobs, mask), pg_clipfrac=clipped > unclipped
    )


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """Geometric-Mean Policy Optimization (arXiv:2507.20673).

    With d the log-ratio of a token, A the mean advantage of its sample, and max and min as the sign of A says:

        c = min(d, clip_high) where A > 0, max(d, -clip_low) where A < 0        per token
        loss = -A exp(mean over the sample of c)                                on every unmasked token of the sample

    So seq-mean-token-mean gives the paper's objective. The bounds are those of the log-ratio: the paper's 0.4 and 0.4 are
    ratios of 0.67 to 1.49. The paper has one advantage per sample. Where tokens differ, this is their mean, as in verl,
    which however clips each token by the sign of its own advantage; the loss would then not bound the unclipped one.

    Args:
        logprobs, old_logprobs, advantages: floating [T].
        mask: bool or 0/1 [T].
        lengths: int64 [B].
        clip_low, clip_high: the log-ratio of a token is clipped to -clip_low .. clip_high.

    Returns:
        token_loss [T] and statistics, as in `rl.objectives.policy_loss`.
            pg_clipfrac: tokens where the clip binds, so that their gradient is cut.
    """
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    advantage = _mean(torch.where(mask, advantages, 0.0), mask, lengths)
    sign = expand(advantage.sign(), lengths)
    clipped = log_ratio.clamp(-clip_low, clip_high)
    binding = sign * clipped < sign * log_ratio
    log_mean = _mean(torch.where(binding, clipped, log_ratio), mask, lengths)
    loss = -advantage * log_mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.where(mask, expand(loss, lengths), 0.0), summed(
        ppo_kl=-masked_log_ratio(logprobs, old_logprobs, mask), pg_clipfrac=binding
    )
