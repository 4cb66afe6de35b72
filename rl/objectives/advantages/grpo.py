"""GRPO's group-relative advantage: a reward compared with the rewards of all samples of the prompt.

    A = (r - mean_G r) / (std_G r + eps)        GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2)
    A = r - mean_G r                            without `normalize_by_std`: Dr.GRPO (arXiv:2503.20783)

The first is the paper's outcome supervision. For example, rewards of 1, 0, 0, 0 without division give 0.75,
-0.25, -0.25, -0.25. The standard deviation is the unbiased estimate (n - 1), as in verl and TRL; the paper
does not say which.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.objectives.groups import by_group, centered, divide, group_std, restore
from rl.objectives.segments import expand

NEEDS = ("groups",)
FORMULA = "(r - mean_G r) / (std_G r + 1e-6); without the division Dr.GRPO"
SOURCE = "2402.03300, 2503.20783"


@dataclass
class GrpoOptions:
    normalize_by_std: bool = True
    """Divide by the standard deviation of the group. False gives Dr.GRPO's advantage."""


@torch.no_grad()
def grpo(rewards: Tensor, groups: Tensor, *, normalize_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Return group-relative advantages, [N].

    Args:
        rewards: floating [N].
        groups: int64 [N].
        normalize_by_std: divide by the standard deviation of the group.
        eps: added to the standard deviation.
    """
    order, ascending, sizes = by_group(rewards, groups)
    advantages = centered(ascending, sizes)
    if normalize_by_std:
        advantages = divide(advantages, expand(group_std(advantages, sizes), sizes) + eps)
    return restore(advantages, order, rewards.dtype)
