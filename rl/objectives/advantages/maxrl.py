"""MaxRL: a reward less its group's mean, divided by that mean (arXiv:2602.02710).

    A = (r - mean_G r) / (mean_G r + eps)

With rewards of 0 and 1 the expected gradient is that of a truncated expansion of the log-likelihood of a
correct answer, where GRPO's is that of its probability. A prompt that is rarely solved weighs more. A group
whose mean reward is 0 has no advantage.
"""

import torch
from torch import Tensor

from rl.objectives.groups import by_group, centered, restore
from rl.objectives.segments import expand, segment_mean

NEEDS = ("groups",)
FORMULA = "(r - mean_G r) / (mean_G r + 1e-6), for rewards of at least 0"
SOURCE = "2602.02710"


@torch.no_grad()
def maxrl(rewards: Tensor, groups: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return advantages relative to the mean reward of the group, [N].

    Args:
        rewards: floating [N], not negative.
        groups: int64 [N].
        eps: added to the mean.

    Raises:
        ValueError: a reward is negative.
    """
    if len(rewards) and float(rewards.min()) < 0:
        raise ValueError(
            f"a reward of {float(rewards.min()):g}, but maxrl divides by the mean reward of a group, which "
            "requires rewards of at least 0; change the reward function or the estimator."
        )
    order, ascending, sizes = by_group(rewards, groups)
    means = expand(segment_mean(ascending, sizes), sizes)
    return restore(centered(ascending, sizes) / (means + eps), order, rewards.dtype)
