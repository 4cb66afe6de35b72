"""Geometric-Mean Policy Optimization (arXiv:2507.20673).

With d the log-ratio of a token and A the mean advantage of its sample:

    c = min(d, clip_high) where A > 0, max(d, -clip_low) where A < 0        per token
    loss = -A exp(mean over the sample of c)                                on each unmasked token

With seq-mean-token-mean this is the paper's objective. The bounds apply to the log-ratio: for example, the
paper's 0.4 and 0.4 are ratios of 0.67 to 1.49. The paper has one advantage per sample. If the tokens'
advantages differ, A is their mean, as in verl. verl clips each token by the sign of its own advantage; its
loss then does not bound the unclipped loss.
"""

import torch
from torch import Tensor

from rl.objectives.log_ratio import MAX_LOG_RATIO, TokenLoss, masked_log_ratio, sample_mean, summed
from rl.objectives.segments import expand

PER_SAMPLE = True
RECIPE = {"clip_low": 0.4, "clip_high": 0.4, "aggregation": "seq-mean-token-mean"}
FORMULA = "sample: -A exp(mean of log-ratios clipped against A)"
SOURCE = "2507.20673"


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Return the loss of each token [T] and statistics.

    Args:
        clip_low, clip_high: the log-ratio of a token is clipped to -clip_low .. clip_high.

    Statistics:
        pg_clipfrac: tokens where the clip binds, so that their gradient is cut.
    """
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    advantage = sample_mean(torch.where(mask, advantages, 0.0), mask, lengths)
    sign = expand(advantage.sign(), lengths, len(mask))
    clipped = log_ratio.clamp(-clip_low, clip_high)
    binding = sign * clipped < sign * log_ratio
    log_mean = sample_mean(torch.where(binding, clipped, log_ratio), mask, lengths)
    loss = -advantage * log_mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.where(mask, expand(loss, lengths, len(mask)), 0.0), summed(
        ppo_kl=-masked_log_ratio(logprobs, old_logprobs, mask), pg_clipfrac=binding
    )
