"""Soft Adaptive Policy Optimization (arXiv:2511.20347): a gate that decays smoothly instead of a clip.

    loss = -A (4 / tau) sigmoid(tau (r - 1))
    tau = sapo_tau_positive where A > 0, sapo_tau_negative elsewhere

At r = 1 its gradient is -A, as PPO's. It decays on both sides, faster for a greater tau. The paper sets the
negative tau (1.05) above the positive one (1.0), since negative advantages raise the logits of all the tokens
that were not sampled. At r = 1 the loss itself is -2 A / tau, so its value is not comparable to the value of
another loss.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rl.config.ranges import POSITIVE
from rl.objectives.log_ratio import TokenLoss, masked_log_ratio, summed

RECIPE = {"aggregation": "seq-mean-token-mean"}
FORMULA = "-A (4/tau) sigmoid(tau (ratio - 1))"
SOURCE = "2511.20347"


@dataclass
class SapoOptions:
    sapo_tau_positive: Annotated[float, POSITIVE] = 1.0
    """Temperature of the gate where the advantage is positive."""
    sapo_tau_negative: Annotated[float, POSITIVE] = 1.05
    """Temperature of the gate where it is negative."""


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sapo_tau_positive: float,
    sapo_tau_negative: float,
) -> TokenLoss:
    """Return the loss of each token [T] and statistics. Raises ValueError if a temperature is not
    positive."""
    if not (sapo_tau_positive > 0 and sapo_tau_negative > 0):
        raise ValueError(
            f"sapo_tau_positive={sapo_tau_positive} and sapo_tau_negative={sapo_tau_negative} must be "
            "positive; the paper uses 1.0 and 1.05."
        )
    mask = mask.bool()
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = torch.where(mask, advantages, 0.0)
    tau = torch.full_like(advantages, sapo_tau_negative).masked_fill(advantages > 0, sapo_tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (torch.exp(log_ratio) - 1))
    return -advantages * gate, summed(ppo_kl=-log_ratio)
