"""The advantage of the whole response, spread over its turns with a discount (RAGEN, arXiv:2504.20073).

    A_k = gamma^(K - k) (r - mean_G r) / (std_G r + eps)        for all tokens of turn k of K

with gamma = `objective.turn_gamma`. The last turns get the largest part of the final reward. For example,
with gamma = 0.5 three turns have 1/4, 1/2 and 1 times the advantage. With gamma = 1 every turn has GRPO's
advantage, as in the paper.
"""

import torch
from torch import Tensor

from rl.objectives.advantages.grpo import grpo
from rl.objectives.advantages.turn_return import at_tokens, number_turns

NEEDS = ("groups",)
PER_TOKEN = True
FORMULA = "turn_gamma^(K - k) (r - mean_G r) / (std_G r + 1e-6) for all tokens of turn k of K"
SOURCE = "2504.20073"


@torch.no_grad()
def turn_spread(
    rewards: Tensor,
    groups: Tensor,
    lengths: Tensor,
    mask: Tensor,
    turns: Tensor | None = None,
    *,
    turn_gamma: float,
    normalize_by_std: bool,
) -> Tensor:
    """Return advantages [T], 0 at masked positions; arguments as for `turn_return`."""
    sample, _, cell = number_turns(lengths, turns)
    counts = sample.bincount(minlength=len(lengths))
    before_last = counts[sample] - 1 - (torch.arange(len(sample)) - (counts.cumsum(0) - counts)[sample])
    whole = grpo(rewards.double(), groups, normalize_by_std=normalize_by_std)
    return at_tokens(whole[sample] * turn_gamma ** before_last.double(), cell, mask, rewards.dtype)
