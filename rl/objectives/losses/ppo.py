"""Clipped surrogate loss of PPO.

    loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)     PPO, arXiv:1707.06347, equation 7, negated
    loss = min(loss, -dual_clip A)  where A < 0                   dual clip, arXiv:1912.09729

clip_high > clip_low is the clip-higher of DAPO (arXiv:2503.14476). For example, with clip_high=0.2 a token
with A > 0 has no gradient once r exceeds 1.2.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rl.config.ranges import ZERO_OR_ABOVE_ONE
from rl.objectives.log_ratio import TokenLoss, masked_log_ratio, summed

FORMULA = "max(-ratio A, -clip(ratio) A); for A < 0 at most -dual_clip A"
SOURCE = "1707.06347, 1912.09729"


@dataclass
class PpoOptions:
    dual_clip: Annotated[float, ZERO_OR_ABOVE_ONE] = 3.0
    """Bound of the loss for negative advantages, as a factor of the advantage. 0 turns it off."""


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> TokenLoss:
    """Return the loss of each token [T] and statistics.

    Args:
        clip_low: the ratio is clipped from below at 1 - clip_low.
        clip_high: the ratio is clipped from above at 1 + clip_high.
        dual_clip: bound of the loss for negative advantages as a factor of the advantage, > 1. 0: off.

    Statistics:
        pg_clipfrac: tokens where the clipped term is the larger one, so that the gradient is cut.
        pg_clipfrac_lower: tokens where the dual clip is the smaller one.

    Raises:
        ValueError: dual_clip is neither 0 nor greater than 1.
    """
    if dual_clip != 0 and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be greater than 1, or 0 to turn it off.")
    mask = mask.bool()
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = torch.where(mask, advantages, 0.0)
    ratio = torch.exp(log_ratio)

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    token_loss = torch.maximum(unclipped, clipped)
    binding = clipped > unclipped

    lower_binding = torch.zeros_like(mask)
    if dual_clip != 0:
        bound = -advantages * dual_clip
        lower_binding = (advantages < 0) & (token_loss > bound)
        token_loss = torch.where(lower_binding, bound, token_loss)
    return token_loss, summed(ppo_kl=-log_ratio, pg_clipfrac=binding, pg_clipfrac_lower=lower_binding)
