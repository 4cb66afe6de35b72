"""Pass@k for k the size of the group: only the best sample counts, by the group's loss without it.

    A = r_max - r_second for the best sample, 0 for the others        arXiv:2503.19595

This is the leave-one-out advantage of the maximum. Samples that share the best reward all get 0, because the
group loses nothing without one of them. For example, rewards of 3, 1, 0 have A = 2, 0, 0 before the division,
and rewards of 3, 3, 0 have 0, 0, 0. `normalize_by_std` divides by the group's unbiased standard deviation +
eps, as verl does by default.
"""

import torch
from torch import Tensor

from rl.objectives.groups import by_group, centered, divide, group_std, restore

NEEDS = ("groups",)
FORMULA = "best of G: r_max - r_second, the others 0; over std_G"
SOURCE = "2503.19595"


@torch.no_grad()
def grpo_passk(rewards: Tensor, groups: Tensor, *, normalize_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Return the lead of the best sample of each group and 0 for the others, [N]; none is negative.

    Args:
        rewards: floating [N].
        groups: int64 [N].
        normalize_by_std: divide by the standard deviation of the group.
        eps: added to the standard deviation.
    """
    order, ascending, sizes = by_group(rewards, groups)
    best = sizes.cumsum(0) - 1
    gain = torch.where(sizes > 1, ascending[best] - ascending[(best - 1).clamp(min=0)], 0.0)
    if normalize_by_std:
        gain = divide(gain, group_std(centered(ascending, sizes), sizes) + eps)
    advantages = torch.zeros_like(ascending)
    advantages[best] = gain
    return restore(advantages, order, rewards.dtype)
