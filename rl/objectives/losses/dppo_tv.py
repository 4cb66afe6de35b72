"""Divergence PPO with the binary total variation (DPPO, arXiv:2602.04879), in verl's form.

    loss = -sg(min(r, dppo_max_ratio)) A logprobs where the token is inside the trust region, else 0

With p and q the probabilities of the sampled token under the policy and the old one, a token is outside if A
> 0 and p - q > clip_high, or A <= 0 and q - p > clip_low. |p - q| is a distance between two distributions
over (this token, any other). PPO's r instead moves a lot for rare tokens that hardly matter: for example,
from q = 0.001 to p = 0.003 it is 3, but |p - q| = 0.002.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rl.config.ranges import ONE_OR_MORE
from rl.objectives.log_ratio import TokenLoss, masked_log_ratio, summed

FORMULA = "-sg(ratio) A log pi within a trust region in probability"
SOURCE = "2602.04879"


@dataclass
class DppoTvOptions:
    dppo_max_ratio: Annotated[float, ONE_OR_MORE] = 20.0
    """Largest weight of a token by its probability ratio; verl's `clip_ratio_c`."""


def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dppo_max_ratio: float = 20.0,
) -> TokenLoss:
    """Return the loss of each token [T] and statistics.

    Args:
        clip_low, clip_high: radii of the trust region in probability, for tokens made rarer and more
            frequent.
        dppo_max_ratio: the ratio is truncated to this. The paper warns of small values (section 5.4); verl's
            default is 20.

    Statistics:
        pg_clipfrac: tokens outside the trust region.
        pg_clipfrac_lower: tokens inside with a truncated ratio.
    """
    mask = mask.bool()
    logprobs, old_logprobs = torch.where(mask, logprobs, 0.0), torch.where(mask, old_logprobs, 0.0)
    rise = (logprobs.exp() - old_logprobs.exp()).detach()
    inside = torch.where(advantages > 0, rise <= clip_high, rise >= -clip_low)
    return truncated_loss(logprobs, old_logprobs, advantages, mask, inside, dppo_max_ratio)


def truncated_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, inside: Tensor, max_ratio: float
) -> TokenLoss:
    """Return DPPO's loss for the tokens inside the trust region, bool [T], and 0 for the others."""
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = torch.exp(log_ratio).detach()
    inside = inside & mask
    token_loss = torch.where(inside, -ratio.clamp(max=max_ratio) * advantages, 0.0) * logprobs
    return token_loss, summed(
        ppo_kl=-log_ratio, pg_clipfrac=mask & ~inside, pg_clipfrac_lower=inside & (ratio > max_ratio)
    )
