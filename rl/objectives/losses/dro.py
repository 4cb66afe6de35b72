"""Direct Reward Optimization with its penalty per token, as in verl and Tinker.

    loss = -A logprobs + dro_beta / 2 (logprobs - old_logprobs)^2

DRO (arXiv:2405.19107, equation 4) and Kimi k1.5 (arXiv:2501.12599, section 2.3.2) minimise the square (R - V
- tau log(policy / old))^2 with the log-ratio of the whole response. At dro_beta = tau the loss here has the
same gradient, up to a constant. There is no exp, so the log-ratio is not clamped and the penalty keeps
pulling an outlier back.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rl.config.ranges import POSITIVE
from rl.objectives.log_ratio import TokenLoss
from rl.objectives.losses.reinforce import reinforce

FORMULA = "-A log pi + dro_beta/2 log(ratio)^2"
SOURCE = "as in Tinker; 2405.19107, 2501.12599"


@dataclass
class DroOptions:
    dro_beta: Annotated[float, POSITIVE] = 0.1
    """Weight of the squared log-ratio."""


def dro(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, dro_beta: float
) -> TokenLoss:
    """Return the loss of each token [T] and statistics. Raises ValueError if dro_beta is not positive."""
    if not dro_beta > 0:
        raise ValueError(f"dro_beta={dro_beta} must be positive; without the penalty use the loss reinforce.")
    mask = mask.bool()
    token_loss, stats = reinforce(logprobs, old_logprobs, advantages, mask)
    return token_loss + 0.5 * dro_beta * torch.where(mask, logprobs - old_logprobs, 0.0).square(), stats
