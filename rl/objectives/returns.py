"""Rewards, returns and whitening per token: mathematics that the estimators with `PER_TOKEN` share.

Shapes and conventions are as in `rl.objectives.advantages`: `N` samples, `T` response tokens, `T'` unmasked
tokens. The functions drop the masked tokens first. Therefore no formula below contains a mask.
"""

import torch
from torch import Tensor

from rl.objectives.segments import segment_sum


@torch.no_grad()
def place_at_end(scores: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """Return token rewards [T]: a response's score on its last unmasked token, 0 elsewhere.

    Args:
        scores: floating [N]. The score of a sample without unmasked tokens is dropped.
        lengths: int64 [N].
        mask: bool or 0/1 [T].
    """
    assert scores.shape == lengths.shape, f"{tuple(scores.shape)} scores for {tuple(lengths.shape)} lengths"
    keep, counts = kept(lengths, mask)
    present = counts > 0
    rewards = scores.new_zeros(int(counts.sum()))
    rewards[counts.cumsum(0)[present] - 1] = scores[present]
    return put_back(rewards, keep, scores.dtype)


@torch.no_grad()
def returns(token_rewards: Tensor, lengths: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted reward to go of each token, [T].

    It is G_t = r_t + gamma * G_{t+1} over the unmasked tokens of a response.

    For example, token rewards of 0, 0, 1 with gamma=0.5 give 0.25, 0.5, 1.

    Args:
        token_rewards: floating [T].
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        gamma: discount per unmasked token, in [0, 1].

    Raises:
        ValueError: gamma outside [0, 1].
    """
    require_fraction("gamma", gamma)
    keep, counts = kept(lengths, mask)
    return put_back(reward_to_go(token_rewards[keep].double(), counts, gamma), keep, token_rewards.dtype)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) over all unmasked tokens of the batch, [T], 0 at masked
    positions.

    The variance is unbiased (divided by count - 1), as in verl and TRL. A batch of one unmasked token has no
    variance and gets 0, with or without `shift_mean`; verl raises an error.

    Args:
        x: floating [T].
        mask: bool or 0/1 [T].
        shift_mean: whether the result has the mean 0; otherwise the mean of x is added again.
        eps: added to the variance.
    """
    keep = mask.bool()
    return put_back(whiten_kept(x[keep].double(), shift_mean=shift_mean, eps=eps), keep, x.dtype)


def require_fraction(name: str, value: float) -> None:
    """Raise ValueError if the value is not between 0 and 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must be between 0 and 1; 1.0 discounts nothing.")


def kept(lengths: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (keep bool [T], number of kept tokens of each sample int64 [N]).

    Raises RuntimeError if the lengths do not add up to T.
    """
    keep = mask.bool()
    return keep, segment_sum(keep.double(), lengths).long()


def put_back(kept: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [T] of `dtype`: kept [T'] at the positions of keep [T], 0 elsewhere."""
    x = torch.zeros(keep.shape, dtype=dtype, device=keep.device)
    x[keep] = kept.to(dtype)
    return x


def tokens_after(counts: Tensor) -> Tensor:
    """Return the number of tokens of the same sample that follow each token, int64 [T']."""
    ends = torch.repeat_interleave(counts.cumsum(0), counts)
    return ends - 1 - torch.arange(len(ends), device=counts.device)


def reward_to_go(x: Tensor, counts: Tensor, discount: float | Tensor) -> Tensor:
    """Return y_t = x_t + discount * y_{t+1} within each sample: float64 [T'] -> [T'].

    discount: one number, or [T'] with one number for all tokens of a sample.

    The sums are computed by doubling: if y_t holds the first `reach` terms from t on, adding discount^reach *
    y_{t+reach} doubles the number of terms. This takes log2(longest response) passes over flat tensors
    without padding. The recurrence itself would need one kernel per position. For example, 1,000 tokens take
    10 passes.
    """
    after = tokens_after(counts)
    longest = int(counts.max()) if len(counts) else 0
    y, reach = x.clone(), 1
    while reach < longest:
        # `where` is used instead of a product with 0, because NaN must not spread to the sample before.
        factor = discount[:-reach] if isinstance(discount, Tensor) else discount
        y[:-reach] += torch.where(after[:-reach] >= reach, y[reach:], 0.0) * factor**reach
        reach *= 2
    return y


def whiten_kept(x: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Whiten float64 [T'] without masked tokens; see `whiten`."""
    if len(x) < 2:
        return torch.zeros_like(x)
    # The first token is subtracted, so that equal numbers give exactly 0. Otherwise a rounding error of the
    # mean would become 1e4 times larger.
    relative = x - x[0]
    centered = relative - relative.mean()
    whitened = centered * torch.rsqrt(centered.square().sum() / (len(x) - 1) + eps)
    return whitened if shift_mean else whitened + x.mean()
