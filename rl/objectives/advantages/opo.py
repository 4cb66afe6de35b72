"""OPO (arXiv:2505.23585): a reward minus the length-weighted mean of its group.

    A = r - sum_G(length * r) / sum_G(length)

The baseline minimises the variance of the policy gradient if the squared norm of a response's score function
grows like its length. Lengths are counted tokens. In a group without counted tokens the baseline is the plain
mean.
"""

import torch
from torch import Tensor

from rl.objectives.groups import by_group, centered, restore
from rl.objectives.segments import expand, segment_sum

NEEDS = ("groups",)
FORMULA = "r - sum_G(length r) / sum_G(length)"
SOURCE = "2505.23585"


@torch.no_grad()
def opo(rewards: Tensor, groups: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """Return the advantages of all tokens, [T].

    Args:
        rewards: floating [N].
        groups: int64 [N].
        lengths: int64 [N].
        mask: bool or 0/1 [T].
    """
    counts = segment_sum(mask.float(), lengths).long()
    order, ascending, sizes = by_group(rewards, groups)
    relative, tokens = centered(ascending, sizes), counts[order].double()
    baseline = segment_sum(tokens * relative, sizes) / segment_sum(tokens, sizes).clamp(min=1)
    return expand(restore(relative - expand(baseline, sizes), order, rewards.dtype), lengths)
