"""Divergence PPO with the binary KL divergence (DPPO, arXiv:2602.04879), in verl's form.

This is the loss of `dppo_tv` with another trust region. With p and q as in `dppo_tv`,

    D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

is KL(old || policy) over (this token, any other). A token is outside if A > 0, p > q and D > clip_high, or A
<= 0, p < q and D > clip_low.
"""

import torch
from torch import Tensor

from rl.objectives.log_ratio import TokenLoss
from rl.objectives.losses.dppo_tv import truncated_loss

RECIPE = {"clip_low": 0.05, "clip_high": 0.05}
FORMULA = "-sg(ratio) A log pi within a trust region in nats (KL)"
SOURCE = "2602.04879"

DPPO_EPS = 1e-8
"""Added to the probability of all other tokens before its log, as in verl; for example, if the policy is
certain of a token, this probability is 0 in float32."""


def dppo_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dppo_max_ratio: float = 20.0,
) -> TokenLoss:
    """Return the loss of each token [T] and the statistics of `dppo_tv`.

    Args:
        clip_low, clip_high: radii of the trust region in nats, for tokens made rarer and more frequent.
        dppo_max_ratio: as for `dppo_tv`.
    """
    mask = mask.bool()
    logprobs, old_logprobs = torch.where(mask, logprobs, 0.0), torch.where(mask, old_logprobs, 0.0)
    new, old = logprobs.detach(), old_logprobs.detach()
    # expm1, because 1 - exp(x) has no digit left in float32 for the probabilities near 1 that most tokens
    # have.
    other, old_other = ((-torch.expm1(x)).clamp(min=0) + DPPO_EPS for x in (new, old))
    divergence = old.exp() * (old - new) + old_other * torch.log(old_other / other)
    moves_with_advantage = torch.where(advantages > 0, new > old, new < old)
    radius = torch.full_like(divergence, clip_low).masked_fill(advantages > 0, clip_high)
    inside = ~moves_with_advantage | (divergence <= radius)
    return truncated_loss(logprobs, old_logprobs, advantages, mask, inside, dppo_max_ratio)
