"""Comparisons within groups of samples: mathematics that several advantage estimators share.

Shapes: `N` is the number of samples of the batch over all ranks, because one rank may hold only a part of a
group. `P` is the number of groups. `groups` is int64 [N]: samples with the same number have the same prompt.
Numbers, order and sizes of groups are arbitrary. For example, [7, 2, 7] is a group of two samples and a group
of one.
"""

import torch
from torch import Tensor

from rl.objectives.segments import expand, segment_mean, segment_sum


def by_group(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay groups end to end, with ascending rewards in each group.

    Returns (order int64 [N], rewards[order] float64 [N], sizes of groups int64 [P]). This order makes later
    sums bitwise independent of the order of the samples.
    """
    assert rewards.shape == groups.shape and rewards.dim() == 1, (
        f"{tuple(rewards.shape)} rewards for {tuple(groups.shape)} group numbers"
    )
    order = torch.argsort(rewards, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    _, sizes = torch.unique_consecutive(groups[order], return_counts=True)
    return order, rewards[order].double(), sizes


def centered(ascending: Tensor, sizes: Tensor) -> Tensor:
    """Return rewards minus the mean of their group, float64 [N].

    The smallest reward of the group is subtracted first, so that equal rewards give exactly 0 in any dtype.
    Otherwise a rounding error of the mean would be divided by a standard deviation of nearly 0.
    """
    least = ascending[sizes.cumsum(0) - sizes]
    above = ascending - expand(least, sizes)
    return above - expand(segment_mean(above, sizes), sizes)


def group_std(centered: Tensor, sizes: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each group, float64 [P]; 0 for a group of one."""
    return (segment_sum(centered.square(), sizes) / (sizes - 1).clamp(min=1)).sqrt()


def divide(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, and x where scale is 0."""
    return x / torch.where(scale > 0, scale, 1.0)


def restore(grouped: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grouped values in the original order, from before `by_group`."""
    advantages = torch.empty_like(grouped)
    advantages[order] = grouped
    return advantages.to(dtype)
