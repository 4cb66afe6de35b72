"""CISPO: clipped importance-sampling weight (MiniMax-M1, arXiv:2506.13585, equations 4 and 5).

    loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs

Unlike in PPO, a token outside the bounds keeps its gradient, with a bounded weight. The paper clips from
above only: a clip_low of 1 or more leaves the ratio unbounded from below. For example, with clip_high=0.2 a
token with r = 3 has the weight 1.2 A.
"""

import torch
from torch import Tensor

from rl.objectives.log_ratio import TokenLoss, masked_log_ratio, summed

RECIPE = {"clip_low": 1.0}
FORMULA = "-sg(clip(ratio)) A log pi; clip_low 1 leaves the ratio unbounded from below"
SOURCE = "2506.13585"


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Return the loss of each token [T] and statistics.

    Args:
        clip_low: the ratio is clipped from below at 1 - clip_low.
        clip_high: the ratio is clipped from above at 1 + clip_high.

    Statistics:
        pg_clipfrac: tokens with a ratio outside the bounds, whatever the advantage.
    """
    mask = mask.bool()
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = torch.exp(log_ratio).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    token_loss = -weight * torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs, 0.0)
    return token_loss, summed(ppo_kl=-log_ratio, pg_clipfrac=(weight != ratio) & mask)
