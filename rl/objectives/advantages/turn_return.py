"""Returns of single turns, compared within the group (turn-level rewards as in arXiv:2505.11821).

r_k is the environment's reward of turn k. The part of the sample's reward that belongs to no turn is added to
the last turn. With gamma = `objective.turn_gamma`, every token of turn k gets

    A_k = (G_k - mean_G) / (std_G + eps),   G_k = r_k + gamma G_{k+1}

with mean and standard deviation over the returns of all turns in the group. There are two differences from
the paper. Returns are compared, not single rewards, so that a turn is credited with later rewards. For
example, with gamma = 0.5 turn rewards of 0, 0, 1 have returns of 0.25, 0.5, 1. Turns of all positions are
compared with each other, because few samples of a group reach a late turn. With one turn per sample it is
GRPO's advantage.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rl.config.ranges import SIGNED_FRACTION
from rl.objectives.advantages.grpo import grpo
from rl.objectives.returns import reward_to_go
from rl.objectives.segments import expand, segment_sum

NEEDS = ("groups",)
PER_TOKEN = True
FORMULA = "(G_k - mean_G) / (std_G + 1e-6) for all tokens of turn k, G_k = r_k + turn_gamma G_{k+1}"
SOURCE = "2505.11821"


@dataclass
class TurnReturnOptions:
    turn_gamma: Annotated[float, SIGNED_FRACTION] = 0.95
    """Discount per turn of a trajectory of several turns. A negative value is for two players who move
    alternately, where one loses what the other gains."""


@torch.no_grad()
def turn_return(
    rewards: Tensor,
    groups: Tensor,
    lengths: Tensor,
    mask: Tensor,
    turns: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    *,
    turn_gamma: float,
    normalize_by_std: bool,
) -> Tensor:
    """Return advantages [T], 0 at masked positions.

    Args:
        rewards: floating [N].
        groups: int64 [N].
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        turns: int [T], number of the turn that sampled each token, from 1; 0 or less for other tokens. None:
            one turn per sample.
        turn_rewards: floating [T], rewards of single turns at any of their tokens. None: 0.
        turn_gamma: discount per turn, in [-1, 1].
        normalize_by_std: divide by the standard deviation of the group.
    """
    sample, turn, cell = number_turns(lengths, turns)
    if turn_rewards is None:
        turn_rewards = torch.zeros(len(mask), dtype=rewards.dtype)
    given = segment_sum(turn_rewards.double(), lengths)
    counts = sample.bincount(minlength=len(lengths))
    x = torch.zeros(len(sample), dtype=torch.float64)
    x.index_add_(0, cell[cell >= 0], turn_rewards.double()[cell >= 0])
    x[counts.cumsum(0)[counts > 0] - 1] += (rewards.double() - given)[counts > 0]
    returns = reward_to_go(x, counts, turn_gamma)
    advantages = grpo(returns, groups[sample], normalize_by_std=normalize_by_std)
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    advantages = torch.where(sizes[group][sample] > 1, advantages, 0.0)
    return at_tokens(advantages, cell, mask, rewards.dtype)


def number_turns(lengths: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Number the turns of all samples in the order of the samples.

    Returns (sample of each turn int64 [K], its number in the sample int64 [K], index of each token's turn
    int64 [T], -1 for tokens that the policy did not sample).
    """
    owner = expand(torch.arange(len(lengths), device=lengths.device), lengths)
    turns = torch.ones_like(owner) if turns is None else turns.long()
    own = turns > 0
    pairs, cell = torch.stack([owner[own], turns[own]]).unique(dim=1, return_inverse=True)
    numbers = torch.full_like(owner, -1)
    numbers[own] = cell
    return pairs[0], pairs[1], numbers


def at_tokens(values: Tensor, cell: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [T]: the value [K] of each token's turn; 0 for masked tokens and tokens outside of turns."""
    out = torch.zeros(cell.shape, dtype=dtype)
    kept = (cell >= 0) & mask.bool()
    out[kept] = values[cell[kept]].to(dtype)
    return out
