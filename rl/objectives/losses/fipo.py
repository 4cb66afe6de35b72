"""Future-KL Influenced Policy Optimization (FIPO, arXiv:2603.19835): PPO's loss with weighted advantages.

    A'_t = A_t f_t,   f_t = sg(clip(exp(F_t), fipo_low, fipo_high))
    F_t = sum over k >= t of 2^(-(k - t) / fipo_half_life) d_k,   d = logprobs - old_logprobs

F_t is positive if the update makes the rest of the sample, from token t on, more likely, and negative if less
likely. Tokens with a positive F_t get a larger advantage. Tokens that the policy did not sample do not
contribute to F, and neither do tokens with a ratio above `dual_clip` (0: none). For example, with
fipo_half_life=32 the token itself counts fully and the token 32 later half.

Two guards come from the authors' code, a verl fork. A token with a negative advantage and a ratio above
`fipo_safe_ratio` has a weight from 0.8 to 1. A sample in which more than one token is beyond the dual clip
has no loss. Its tokens stay in the denominator, whereas the authors divide by the other tokens.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rl.config.ranges import ONE_OR_MORE, POSITIVE
from rl.objectives.log_ratio import TokenLoss, masked_log_ratio, summed
from rl.objectives.losses.ppo import ppo
from rl.objectives.returns import kept, put_back, reward_to_go
from rl.objectives.segments import expand, segment_sum

ASCENDING = (("fipo_low", "fipo_high"),)
FORMULA = (
    "PPO's with A clip(exp(F), fipo_low, fipo_high), F the discounted sum of later log-ratios; two guards"
)
SOURCE = "2603.19835"

SAFE_WEIGHTS = (0.8, 1.0)
"""Bounds of the weight of a negative advantage above `fipo_safe_ratio`, as in the authors' code."""


@dataclass
class FipoOptions:
    fipo_half_life: Annotated[float, POSITIVE] = 32.0
    """Distance in tokens at which the weight of a later token in F is 1/2."""
    fipo_low: Annotated[float, POSITIVE] = 1.0
    """Smallest weight of an advantage."""
    fipo_high: Annotated[float, POSITIVE] = 1.2
    """Largest weight of an advantage."""
    fipo_safe_ratio: Annotated[float, ONE_OR_MORE] = 4.0
    """Above this probability ratio the weight of a negative advantage is from 0.8 to 1."""


def fipo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    fipo_half_life: float,
    fipo_low: float,
    fipo_high: float,
    fipo_safe_ratio: float,
) -> TokenLoss:
    """Return the loss of each token [T] and statistics: the statistics of `ppo`, and fipo_weight: the weight
    f of the advantage, fipo_dropped: tokens of samples without a loss.
    """
    with torch.no_grad():
        log_ratio = masked_log_ratio(logprobs, old_logprobs, mask.bool())
        ratio, is_negative = log_ratio.exp(), mask.bool() & (advantages < 0)
        clipped = (ratio > dual_clip) if dual_clip else torch.zeros_like(is_negative)
        log_ratio = torch.where(clipped, 0.0, log_ratio)
        keep, counts = kept(lengths, mask)
        future = put_back(
            reward_to_go(log_ratio[keep].double(), counts, 2 ** (-1 / fipo_half_life)), keep, log_ratio.dtype
        )
        weight = future.exp().clamp(fipo_low, fipo_high)
        weight = torch.where(is_negative & (ratio > fipo_safe_ratio), weight.clamp(*SAFE_WEIGHTS), weight)
        num_clipped = segment_sum((clipped & is_negative).to(log_ratio.dtype), lengths)
        dropped = expand(num_clipped > 1, lengths, len(mask))
    clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    token_loss, stats = ppo(logprobs, old_logprobs, advantages * weight, mask, **clip)
    token_loss = torch.where(dropped, 0.0, token_loss)
    return token_loss, stats | summed(fipo_weight=torch.where(keep, weight, 0.0), fipo_dropped=dropped & keep)
