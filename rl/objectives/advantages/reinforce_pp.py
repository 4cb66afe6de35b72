"""REINFORCE++ (arXiv:2501.03262): discounted reward to go, whitened over all tokens of the batch.

Samples of a prompt are not compared. The paper's KL penalty is part of `token_rewards`, and its gamma is 1.
"""

import torch
from torch import Tensor

from rl.objectives.returns import returns, whiten

NEEDS = ()
PER_TOKEN = True
FORMULA = "reward to go from each token, discounted, whitened over the batch's tokens"
SOURCE = "2501.03262"


@torch.no_grad()
def reinforce_pp(token_rewards: Tensor, lengths: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Return advantages [T], 0 at masked positions.

    Args:
        token_rewards: floating [T].
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        gamma: discount per unmasked token, in [0, 1].

    Raises:
        ValueError: gamma outside [0, 1].
    """
    return whiten(returns(token_rewards.double(), lengths, mask, gamma=gamma), mask).to(token_rewards.dtype)
