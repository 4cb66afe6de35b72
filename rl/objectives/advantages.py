"""Advantage estimators: from the scores of a whole batch to one number per sample.

Shapes: `N` samples of the batch, over all ranks (groups are only complete there); `K` reward columns; `P` prompts, that is
groups. Advantages are constants of the policy gradient, so nothing here is differentiable. Estimators that give each token
its own number are in `returns.py`.

In every function `groups` is int64 [N]: samples with the same number have the same prompt. Any numbers, in any order;
groups may differ in size. A group of one has no one to compare with and gets 0 (verl gives such a sample its raw score);
so, exactly, does a group of equal scores. The result has the dtype of the scores; inside is float64. `scores` are
floating [N], one per sample, finite.
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
        scores: floating [N].
        groups: int64 [N].
        normalize_by_std: divide by the standard deviation of the group.
        eps: added to the standard deviation.

    Returns:
        [N] advantages of the dtype of `scores`.
    """
    order, ascending, sizes = _by_group(scores, groups)
    centered = _centered(ascending, sizes)
    if normalize_by_std:
        centered = _divide(centered, expand(_std(centered, sizes), sizes) + eps)
    return _restore(centered, order, scores.dtype)


@torch.no_grad()
def grpo_passk(scores: Tensor, groups: Tensor, *, normalize_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Pass@k for k the size of the group: only the best sample counts, and only by what the group would lose without it.

    Best score - second best for the best sample, 0 for the others (arXiv:2503.19595, leave-one-out advantage of the
    maximum). If several share the best score, the group loses nothing without one of them: all get 0.
    `normalize_by_std` divides by the group's unbiased standard deviation + eps, as verl does by default.

    Args:
        scores: floating [N].
        groups: int64 [N].
        normalize_by_std: divide by the standard deviation of the group.
        eps: added to the standard deviation.

    Returns:
        [N] advantages of the dtype of `scores`, none negative.
    """
    order, ascending, sizes = _by_group(scores, groups)
    best = sizes.cumsum(0) - 1
    gain = torch.where(sizes > 1, ascending[best] - ascending[(best - 1).clamp(min=0)], 0.0)
    if normalize_by_std:
        gain = _divide(gain, _std(_centered(ascending, sizes), sizes) + eps)
    advantages = torch.zeros_like(ascending)
    advantages[best] = gain
    return _restore(advantages, order, scores.dtype)


@torch.no_grad()
def gdpo(columns: Tensor, groups: Tensor, *, weights: Tensor, eps: float = 1e-6) -> Tensor:
    """Several rewards, each normalised within its group before they are added: GDPO (arXiv:2601.05242).

        sum_k = weights_k * (column_k - group mean) / (group std + eps);   advantage = sum / (batch std of sum + eps)

    Adding first would let different combinations of rewards collapse into the same advantage. Both standard deviations
    are unbiased. The batch statistics are over samples, as in the paper; verl whitens over tokens. The paper also
    subtracts the batch mean of the sum, which is 0, because the sum is 0 over each group.

    Args:
        columns: floating [N, K], K >= 1, one reward per column.
        groups: int64 [N].
        weights: floating [K].
        eps: added to both standard deviations.

    Returns:
        [N] advantages of the dtype of `columns`.
    """
    assert columns.dim() == 2 and weights.shape == columns.shape[1:] and len(weights) > 0, (
        f"{tuple(columns.shape)} rewards, {tuple(weights.shape)} weights"
    )
    normalized = [
        grpo(column, groups, normalize_by_std=True, eps=eps) for column in columns.double().unbind(1)
    ]
    total = torch.stack(normalized, 1) @ weights.double()
    batch_std = (total.square().sum() / max(len(total) - 1, 1)).sqrt()
    return _divide(total, batch_std + eps).to(columns.dtype)


@torch.no_grad()
def rloo(scores: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE leave-one-out: score - mean of the other scores of the group (Ahmadian et al., arXiv:2402.14740).

    The same as n / (n - 1) * (score - mean of the group) for a group of n.

    Args:
        scores: floating [N].
        groups: int64 [N].

    Returns:
        [N] advantages of the dtype of `scores`.
    """
    order, ascending, sizes = _by_group(scores, groups)
    # double first: torch divides integers in float32.
    factor = sizes.double() / (sizes - 1).clamp(min=1)
    return _restore(_centered(ascending, sizes) * expand(factor, sizes), order, scores.dtype)


@torch.no_grad()
def opo(scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Score - length-weighted mean of the group: OPO (arXiv:2505.23585), sum(length * score) / sum(length).

    That baseline minimises the variance of the policy gradient if the squared norm of a response's score function grows
    like its length.

    Args:
        scores: floating [N].
        groups: int64 [N].
        lengths: int64 [N], response tokens of each sample that enter the loss. In a group without any, the baseline is
            the plain mean.

    Returns:
        [N] advantages of the dtype of `scores`.
    """
    assert lengths.shape == scores.shape, f"{tuple(lengths.shape)} lengths for {tuple(scores.shape)} scores"
    order, ascending, sizes = _by_group(scores, groups)
    centered, tokens = _centered(ascending, sizes), lengths[order].double()
    baseline = segment_sum(tokens * centered, sizes) / segment_sum(tokens, sizes).clamp(min=1)
    return _restore(centered - expand(baseline, sizes), order, scores.dtype)


@torch.no_grad()
def gpg(scores: Tensor, groups: Tensor, *, norm: float = 1.0) -> Tensor:
    """Group policy gradient: alpha * (score - mean of the group) / norm (GPG, arXiv:2504.02546).

    alpha = N / (samples in groups whose scores differ) makes up for the groups that contribute no gradient but count in
    the denominator of the loss (the paper's accurate gradient estimation, B / (B - M)). It is one number for the whole
    batch. verl counts samples with a score other than 0 instead, which is another number whenever a mixed group has a
    failure. `norm` is the paper's F_norm, verl's f_norm: 1 by default; for division by the group's standard deviation
    use `grpo`.

    Args:
        scores: floating [N].
        groups: int64 [N].
        norm: divisor, positive.

    Returns:
        [N] advantages of the dtype of `scores`.

    Raises:
        ValueError: norm is not positive.
    """
    if not norm > 0:
        raise ValueError(
            f"norm of gpg is {norm}; it divides the advantages and must be positive, 1.0 for no change"
        )
    order, ascending, sizes = _by_group(scores, groups)
    last = sizes.cumsum(0) - 1
    differ = ascending[last] > ascending[last - sizes + 1]
    alpha = len(scores) / (sizes * differ).sum().clamp(min=1).double()
    return _restore(_centered(ascending, sizes) * (alpha / norm), order, scores.dtype)


@torch.no_grad()
def remax(scores: Tensor, baselines: Tensor) -> Tensor:
    """Score - score of the greedy response to the same prompt: ReMax (arXiv:2310.10505).

    Args:
        scores: floating [N].
        baselines: floating [N], the greedy response's score, repeated for each sample of its prompt.

    Returns:
        [N] advantages of the dtype of `scores`.
    """
    assert scores.shape == baselines.shape and scores.dim() == 1, (
        f"{tuple(scores.shape)} and {tuple(baselines.shape)}"
    )
    return (scores.double() - baselines.double()).to(scores.dtype)


def _by_group(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay groups end to end: (order int64 [N], scores[order] float64 [N], ascending within each group, sizes int64 [P]).

    Ascending, so that the sums below do not depend on the order in which samples came, to the last bit.
    """
    assert scores.shape == groups.shape and scores.dim() == 1, (
        f"{tuple(scores.shape)} and {tuple(groups.shape)}"
    )
    order = torch.argsort(scores, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    _, sizes = torch.unique_consecutive(groups[order], return_counts=True)
    return order, scores[order].double(), sizes


def _centered(ascending: Tensor, sizes: Tensor) -> Tensor:
    """Scores less the mean of their group, float64 [N].

    Taken from the least score first: equal scores then give exactly 0 in any dtype. The rounding error of their mean,
    divided by a standard deviation of nearly 0, would be an advantage.
    """
    least = ascending[sizes.cumsum(0) - sizes]
    above = ascending - expand(least, sizes)
    return above - expand(segment_mean(above, sizes), sizes)


def _std(centered: Tensor, sizes: Tensor) -> Tensor:
    """Unbiased standard deviation of each group, float64 [P]; 0 for a group of one."""
    return (segment_sum(centered.square(), sizes) / (sizes - 1).clamp(min=1)).sqrt()


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, and 0 / 0 is 0: equal scores with eps 0."""
    return x / torch.where(scale > 0, scale, 1.0)


def _restore(grouped: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `_by_group`'s order."""
    advantages = torch.empty_like(grouped)
    advantages[order] = grouped
    return advantages.to(dtype)
