"""Generalised advantage estimation (arXiv:1506.02438, equation 16), and the targets of the value function.

    delta_t = r_t + gamma * V_{t+1} - V_t;   A_t = delta_t + gamma * lam * A_{t+1};   return_t = A_t + V_t

t counts unmasked tokens, so the bootstrap is the value of the next unmasked token. The value after a
response's last token is 0, even if the response was cut off at the length limit, as in TRL and verl. The
algorithm (`rl/algorithms/ppo.py`) calls this function, and whitens its result if `objective.whiten` is set.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rl.config.ranges import FRACTION
from rl.objectives.returns import kept, put_back, require_fraction, reward_to_go, tokens_after

NEEDS = ("critic",)
PER_TOKEN = True
FORMULA = "sum (gamma lam)^k delta_{t+k}, whitened over the batch's tokens"
SOURCE = "1506.02438"


@dataclass
class GaeOptions:
    gamma: Annotated[float, FRACTION] = 1.0
    """Discount per token."""
    lam: Annotated[float, FRACTION] = 1.0
    """Weight of longer returns; 1 is Monte Carlo, 0 is one step."""
    whiten: bool = True
    """Shift and scale the advantages of the whole batch to mean 0 and variance 1."""


@torch.no_grad()
def gae(
    token_rewards: Tensor, old_values: Tensor, lengths: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), both [T] and 0 at masked positions.

    Args:
        token_rewards: floating [T].
        old_values: floating [T], the critic's value of the state before each token was drawn.
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        gamma: discount per unmasked token, in [0, 1].
        lam: in [0, 1]; 0 is the one-step estimate, 1 is discounted reward to go - value.

    Raises:
        ValueError: gamma or lam outside [0, 1].
    """
    require_fraction("gamma", gamma)
    require_fraction("lam", lam)
    assert old_values.shape == token_rewards.shape, (
        f"{tuple(old_values.shape)} values for {tuple(token_rewards.shape)} rewards"
    )
    keep, counts = kept(lengths, mask)
    rewards, values = token_rewards[keep].double(), old_values[keep].double()
    # At the end of a response, roll brings the first value of the next one; `where` discards it, and a NaN
    # with it.
    next_values = torch.where(tokens_after(counts) > 0, values.roll(-1), 0.0)
    advantages = reward_to_go(rewards + gamma * next_values - values, counts, gamma * lam)
    dtype = token_rewards.dtype
    return put_back(advantages, keep, dtype), put_back(advantages + values, keep, dtype)
