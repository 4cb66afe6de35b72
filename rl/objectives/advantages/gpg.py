"""Group policy gradient (GPG, arXiv:2504.02546).

    A = alpha * (r - mean_G r) / norm,   alpha = N / (samples in groups whose rewards differ)

alpha is one number for the whole batch. It compensates for the groups that contribute no gradient but count
in the denominator of the loss (the paper's accurate gradient estimation, B / (B - M)). verl instead counts
samples with a reward other than 0. For example, two groups of four with the rewards 1, 0, 0, 0 and 0, 0, 0, 0
have alpha = 8 / 4 here and 8 / 1 in verl. `norm` is the paper's F_norm, verl's f_norm, and 1 in both; for
division by the group's standard deviation use `grpo`.
"""

import torch
from torch import Tensor

from rl.objectives.groups import by_group, centered, restore

NEEDS = ("groups",)
FORMULA = "(r - mean_G r) N / (samples in groups with spread)"
SOURCE = "2504.02546"


@torch.no_grad()
def gpg(rewards: Tensor, groups: Tensor, *, norm: float = 1.0) -> Tensor:
    """Return GPG's advantages, [N].

    Args:
        rewards: floating [N].
        groups: int64 [N].
        norm: divisor, positive.

    Raises:
        ValueError: norm is not positive.
    """
    if not norm > 0:
        raise ValueError(
            f"norm={norm} of gpg divides the advantages and must be positive; 1.0 changes nothing."
        )
    order, ascending, sizes = by_group(rewards, groups)
    last = sizes.cumsum(0) - 1
    differ = ascending[last] > ascending[last - sizes + 1]
    alpha = len(rewards) / (sizes * differ).sum().clamp(min=1).double()
    return restore(centered(ascending, sizes) * (alpha / norm), order, rewards.dtype)
