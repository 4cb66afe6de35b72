"""Future-KL Influenced Policy Optimization (FIPO, arXiv:2603.19835): PPO's loss with weighted advantages.

    A'_t = A_t f_t,   f_t = sg(clip(exp(F_t), fipo_low, fipo_high))
    F_t = sum over k >= t of 2^(-(k - t) / fipo_half_life) d_k,   d = logprobs - old_logprobs

F_t is positive if the update makes the rest of the sample, from token t on, more likely, and negative if less
likely. Tokens with a positive F_t get a larger advantage. Tokens that the policy did not sample, and tokens
whose ratio exceeds `dual_clip` (0: none), do not contribute to F.
"""

import torch
from torch import Tensor

from rl.objectives.losses.ppo import ppo
from rl.objectives.policy_loss import Loss, masked_log_ratio, summed
from rl.objectives.returns import kept, put_back, reward_to_go

KEYS = {
    "fipo_half_life": (
        "float",
        32.0,
        "POSITIVE",
        "Distance in tokens at which the weight of a later token in F is 1/2.",
    ),
    "fipo_low": ("float", 1.0, "POSITIVE", "Smallest weight of an advantage."),
    "fipo_high": ("float", 1.2, "POSITIVE", "Largest weight of an advantage."),
}
ASCENDING = (("fipo_low", "fipo_high"),)
FORMULA = "PPO's with A clip(exp(F), fipo_low, fipo_high), F the discounted sum of later log-ratios"
SOURCE = "2603.19835"


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
) -> Loss:
    """Return the loss of each token [T] and statistics: those of `ppo`, and
    fipo_weight: the weight f of the advantage.
    """
    with torch.no_grad():
        log_ratio = masked_log_ratio(logprobs, old_logprobs, mask.bool())
        if dual_clip:
            log_ratio = torch.where(log_ratio.exp() > dual_clip, 0.0, log_ratio)
        keep, counts = kept(lengths, mask)
        future = put_back(
            reward_to_go(log_ratio[keep].double(), counts, 2 ** (-1 / fipo_half_life)), keep, log_ratio.dtype
        )
        weight = future.exp().clamp(fipo_low, fipo_high)
    clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    token_loss, stats = ppo(logprobs, old_logprobs, advantages * weight, mask, **clip)
    return token_loss, stats | summed(fipo_weight=torch.where(keep, weight, 0.0))
