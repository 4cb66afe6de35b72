"""REINFORCE: the policy gradient itself, without a ratio (Williams 1992, doi:10.1007/BF00992696).

    loss = -A logprobs

It is valid only while the policy is the one that sampled, so for one update per step. `old_logprobs` enters
`ppo_kl` alone, which shows how far the policy has moved.
"""

import torch
from torch import Tensor

from rl.objectives.log_ratio import TokenLoss, masked_log_ratio, summed

USES_RATIO = False
FORMULA = "-A log pi"
SOURCE = "Williams 1992"


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """Return the loss of each token [T] and statistics."""
    mask = mask.bool()
    token_loss = -torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs, 0.0)
    return token_loss, summed(ppo_kl=-masked_log_ratio(logprobs, old_logprobs, mask))
