"""Generalised advantage estimation (arXiv:1506.02438, equation 16), and the targets of the value function.

    delta_t = r_t + gamma * V_{t+1} - V_t;   A_t = delta_t + gamma * lam * A_{t+1};   return_t = A_t + V_t

t counts unmasked tokens, so the bootstrap is the value of the next unmasked token. The value after a
response's last token is 0, even if the response was cut off at the length limit, as in TRL and verl. The
algorithm (`rl/algorithms/ppo.py`) calls this function, and whitens its result if `objective.whiten` is set.

VAPO (arXiv:2504.05118) decouples the two results. The targets have lam_critic = 1, so that a long response
keeps its reward, and lam of the advantages grows with the l unmasked tokens of a response:

    lam = 1 - 1 / (alpha l)

It is 0 up to l = 1 / alpha. The paper has alpha = 0.05 (`objective.length_adaptive_alpha`). For example, 100
tokens then have lam = 0.8, and 1,000 tokens have lam = 0.98.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from rl.config.ranges import FRACTION, NOT_NEGATIVE, POSITIVE
from rl.objectives.returns import kept, put_back, require_fraction, reward_to_go, tokens_after
from rl.objectives.segments import expand

NEEDS = ("critic",)
PER_TOKEN = True
FORMULA = "sum (gamma lam)^k delta_{t+k}, whitened over the batch's tokens"
SOURCE = "1506.02438; VAPO 2504.05118, PF-PPO 2409.06957"


@dataclass
class GaeOptions:
    gamma: Annotated[float, FRACTION] = 1.0
    """Discount per token."""
    lam: Annotated[float, FRACTION] = 1.0
    """Weight of longer returns; 1 is Monte Carlo, 0 is one step."""
    lam_critic: Annotated[float | None, FRACTION] = None
    """The same for the targets of the critic; VAPO has 1. null: `lam`."""
    length_adaptive_alpha: Annotated[float, NOT_NEGATIVE] = 0.0
    """Advantages of a response of l tokens get 1 - 1 / (alpha l) as lam; VAPO has 0.05. 0: `lam`."""
    whiten: bool = True
    """Shift and scale the advantages of the whole batch to mean 0 and variance 1."""
    filtration: Literal["none", "best", "best-random", "best-worst", "power"] = "none"
    """Weight of a sample in the policy loss (PF-PPO), by the rank of its reward among the samples of the
    prompt; power: |reward|^filtration_power over the batch. The critic learns from all samples."""
    filtration_power: Annotated[float, POSITIVE] = 2.0
    """Exponent of filtration=power."""


@torch.no_grad()
def gae(
    token_rewards: Tensor,
    old_values: Tensor,
    lengths: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    lam_critic: float | None = None,
    length_adaptive_alpha: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), both [T] and 0 at masked positions.

    Args:
        token_rewards: floating [T].
        old_values: floating [T], the critic's value of the state before each token was drawn.
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        gamma: discount per unmasked token, in [0, 1].
        lam: in [0, 1]; 0 is the one-step estimate, 1 is discounted reward to go - value.
        lam_critic: the same for the returns, in [0, 1]; None is lam.
        length_adaptive_alpha: VAPO's alpha, which replaces lam in the advantages; 0 is off.

    Raises:
        ValueError: gamma, lam or lam_critic outside [0, 1].
    """
    lam_critic = lam if lam_critic is None else lam_critic
    for name, value in (("gamma", gamma), ("lam", lam), ("lam_critic", lam_critic)):
        require_fraction(name, value)
    assert old_values.shape == token_rewards.shape, (
        f"{tuple(old_values.shape)} values for {tuple(token_rewards.shape)} rewards"
    )
    keep, counts = kept(lengths, mask)
    rewards, values = token_rewards[keep].double(), old_values[keep].double()
    # At the end of a response, roll brings the first value of the next one; `where` discards it, and a NaN
    # with it.
    next_values = torch.where(tokens_after(counts) > 0, values.roll(-1), 0.0)
    errors = rewards + gamma * next_values - values
    own: float | Tensor = lam
    if length_adaptive_alpha:
        own = expand(1 - 1 / (length_adaptive_alpha * counts.double()).clamp(min=1), counts)
    advantages = reward_to_go(errors, counts, gamma * own)
    decoupled = length_adaptive_alpha or lam_critic != lam
    of_critic = reward_to_go(errors, counts, gamma * lam_critic) if decoupled else advantages
    dtype = token_rewards.dtype
    return put_back(advantages, keep, dtype), put_back(of_critic + values, keep, dtype)
