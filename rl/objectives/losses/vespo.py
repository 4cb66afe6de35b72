"""Variational Sequence-Level Soft Policy Optimization (VESPO, arXiv:2602.10693).

    loss_t = -sg(phi(w)) A_t logprobs_t
    phi(w) = w^k exp(lambda (1 - w))
    w = product over the sample's tokens of pi / pi_old

The weight phi of a whole sample is 1 at w = 1. It decays as w^k towards w = 0, and as exp(-lambda w) for
large w. k and lambda differ between positive and negative advantages. The ratio w belongs to the whole
sample, without division by its length, and no token is clipped. For example, with k = 2 and lambda = 3 a
sample with w = 2 has the weight 4 exp(-3) = 0.2.

The weights of `rollout_correction` (pi_old over the engine) are factors of w, as in TRL, and not of the loss:
phi then bounds the whole ratio. A weight of 0 makes w, and so the loss of the sample, practically 0.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rl.config.ranges import POSITIVE
from rl.objectives.log_ratio import TokenLoss, masked_log_ratio, summed
from rl.objectives.segments import expand, segment_sum

FORMULA = "-sg(w^k exp(lambda (1 - w))) A log pi, with the sample's ratio w"
SOURCE = "2602.10693"

LOG_BOUNDS = (-18.42, 20.0)
"""Bounds of log w, as in the authors' code; beyond them the weight is below 1e-16."""


@dataclass
class VespoOptions:
    vespo_k_positive: Annotated[float, POSITIVE] = 2.0
    """Exponent k where the advantage is not negative."""
    vespo_lambda_positive: Annotated[float, POSITIVE] = 3.0
    """Decay lambda where the advantage is not negative."""
    vespo_k_negative: Annotated[float, POSITIVE] = 3.0
    """Exponent k where the advantage is negative."""
    vespo_lambda_negative: Annotated[float, POSITIVE] = 2.0
    """Decay lambda where the advantage is negative."""


def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    loss_weights: Tensor | None = None,
    *,
    vespo_k_positive: float,
    vespo_lambda_positive: float,
    vespo_k_negative: float,
    vespo_lambda_negative: float,
) -> TokenLoss:
    """Return the loss of each token [T] and statistics.

    Args:
        loss_weights: floating [T], importance weights of the tokens against the policy that generated them;
            None: 1.

    Statistics:
        vespo_weight: phi(w) of the token's sample.
    """
    mask = mask.bool()
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    of_tokens = log_ratio.detach()
    if loss_weights is not None:
        of_tokens = of_tokens + torch.where(mask, loss_weights, 1.0).log().clamp(*LOG_BOUNDS)
    log_w = expand(segment_sum(of_tokens, lengths), lengths, len(mask)).clamp(*LOG_BOUNDS)
    advantages = torch.where(mask, advantages, 0.0)
    is_negative = advantages < 0
    k = torch.full_like(advantages, vespo_k_positive).masked_fill(is_negative, vespo_k_negative)
    decay = torch.full_like(advantages, vespo_lambda_positive)
    decay = decay.masked_fill(is_negative, vespo_lambda_negative)
    weight = torch.exp(k * log_w + decay * (1 - log_w.exp()))
    token_loss = -weight * advantages * torch.where(mask, logprobs, 0.0)
    return token_loss, summed(ppo_kl=-log_ratio, vespo_weight=torch.where(mask, weight, 0.0))
