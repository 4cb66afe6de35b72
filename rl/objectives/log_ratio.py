"""Log-ratios and statistics: mathematics that the losses of `rl.objectives.losses` share."""

import torch
from torch import Tensor

from rl.objectives.segments import segment_sum

MAX_LOG_RATIO = 20.0
"""Bound of the absolute log-ratio before exp, as in verl. exp(20) = 5e8 is far from overflow in float32 and
bfloat16, so one outlier token cannot make the loss infinite."""

TokenLoss = tuple[Tensor, dict[str, Tensor]]
"""Pair of the loss of each token, [T], and statistics by name."""


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return logprobs - old_logprobs [T], clamped to +- MAX_LOG_RATIO; 0 where the bool `mask` [T] is
    False."""
    return torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def summed(**stats: Tensor) -> dict[str, Tensor]:
    """Return the sums of statistics [T], without a graph, in the dtype of the first one.

    stats: bool or floating [T], 0 at masked positions.
    """
    dtype = next(iter(stats.values())).dtype
    return {name: value.detach().to(dtype).sum() for name, value in stats.items()}


def sample_mean(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean over each sample's unmasked tokens, [B]; 0 for a sample without any. x [T] is 0 where
    masked."""
    return segment_sum(x, lengths) / segment_sum(mask.to(x.dtype), lengths).clamp(min=1)
