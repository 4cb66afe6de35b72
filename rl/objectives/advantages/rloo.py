"""REINFORCE leave-one-out (Ahmadian et al., arXiv:2402.14740): a reward minus the mean of the others of its
group.

A = r - mean of the others = n / (n - 1) * (r - mean_G r) for a group of n

For example, rewards of 1, 0, 0 give 1, -1/2, -1/2.
"""

import torch
from torch import Tensor

from rl.objectives.groups import by_group, centered, restore
from rl.objectives.segments import expand

NEEDS = ("groups",)
FORMULA = "r - mean of the others in G"
SOURCE = "2402.14740"


@torch.no_grad()
def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return leave-one-out advantages, [N], from rewards floating [N] and groups int64 [N]."""
    order, ascending, sizes = by_group(rewards, groups)
    # double first: torch divides integers in float32.
    factor = sizes.double() / (sizes - 1).clamp(min=1)
    return restore(centered(ascending, sizes) * expand(factor, sizes), order, rewards.dtype)
