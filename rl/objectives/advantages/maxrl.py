"""MaxRL: the reward minus its group's mean, divided by that mean (arXiv:2602.02710).

    A = (r - mean_G r) / (mean_G r + eps)

With rewards of 0 and 1 the expected gradient is the gradient of a truncated expansion of the log-likelihood
of a correct answer. Prompts that are rarely solved have a larger weight than in GRPO. A group with a mean
reward of 0 has advantages of 0.
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
            f"reward={float(rewards.min()):g} is below 0, but objective.advantage=maxrl divides by the mean "
            "reward of a group; use a reward function with rewards of at least 0, or another advantage."
        )
    order, ascending, sizes = by_group(rewards, groups)
    means = expand(segment_mean(ascending, sizes), sizes)
    return restore(centered(ascending, sizes) / (means + eps), order, rewards.dtype)
