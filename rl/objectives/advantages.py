"""Advantage estimators: from the scores of a whole batch to one number per sample.

Shapes: `N` samples of the batch, over all ranks (groups are only complete there). Advantages are constants of the policy
gradient, so nothing here is differentiable.
"""

import torch
from torch import Tensor

from rl.objectives.segments import expand, segment_mean, segment_sum


@torch.no_grad()
def grpo(scores: Tensor, groups: Tensor, *, normalize_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Group-relative advantage: a sample's score against the other samples of the same prompt.

    With `normalize_by_std`, (score - mean) / (std + eps), GRPO's outcome supervision (DeepSeekMath, arXiv:2402.03300,
    section 4.1.2), where std is the unbiased estimate (n - 1), as in verl and TRL; the paper does not say which. Without,
    score - mean, Dr.GRPO (arXiv:2503.20783).

    Args:
        scores: floating [N], one score per sample, finite.
        groups: int64 [N], samples with the same number have the same prompt. Any numbers, in any order; groups may differ
            in size. A group of one has no one to compare with and gets 0 (verl gives such a sample its raw score).
        normalize_by_std: divide by the standard deviation of the group.
        eps: added to the standard deviation.

    Returns:
        [N] advantages of the dtype of `scores`.
    """
    assert scores.shape == groups.shape and scores.dim() == 1, f"{tuple(scores.shape)} and {tuple(groups.shape)}"
    order = torch.argsort(groups, stable=True)
    _, sizes = torch.unique_consecutive(groups[order], return_counts=True)
    # float64: the mean of equal float32 scores is then exactly that score, and a group of equal scores gets exactly 0.
    # In float32 its rounding error, divided by a std of nearly 0, would be an advantage.
    grouped = scores[order].double()
    centered = grouped - expand(segment_mean(grouped, sizes), sizes)
    if normalize_by_std:
        variance = segment_sum(centered.square(), sizes) / (sizes - 1).clamp(min=1)
        centered = centered / (expand(variance.sqrt(), sizes) + eps)
    advantages = torch.empty_like(centered)
    advantages[order] = centered
    return advantages.to(scores.dtype)
