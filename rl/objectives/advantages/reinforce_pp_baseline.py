"""REINFORCE++ with baseline (arXiv:2501.03262): reward minus the mean of its group, on each token, whitened.

A group of one enters with 0, as a group of equal rewards does; in verl it enters with its raw reward.
Whitening subtracts the mean over the batch's tokens, so such tokens may end off 0: longer responses
contribute more to the mean, and it is 0 only if lengths are equal.
"""

import torch
from torch import Tensor

from rl.objectives.advantages.grpo import grpo
from rl.objectives.returns import kept, put_back, whiten_kept
from rl.objectives.segments import expand

NEEDS = ("groups",)
FORMULA = "r - mean_G r, whitened over the batch's tokens"
SOURCE = "2501.03262"


@torch.no_grad()
def reinforce_pp_baseline(rewards: Tensor, groups: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """Return advantages [T], 0 at masked positions.

    Args:
        rewards: floating [N].
        groups: int64 [N].
        lengths: int64 [N].
        mask: bool or 0/1 [T].
    """
    keep, counts = kept(lengths, mask)
    centered = grpo(rewards.double(), groups, normalize_by_std=False)
    return put_back(whiten_kept(expand(centered, counts)), keep, rewards.dtype)
