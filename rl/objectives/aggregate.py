"""Reduction of the losses of single tokens to the loss of a mini-batch.

Shapes: `T` response tokens of `B` samples, laid end to end; `lengths` int64 [B] is the number of tokens of
each sample, zeros allowed. For example, lengths [3, 0, 2] divide T = 5 tokens among B = 3 samples.
"""

import torch
from torch import Tensor

from rl.objectives.segments import segment_sum

MODES = {
    "token-mean": "sum over tokens / num_tokens (DAPO)",
    "token-sum": "sum over tokens",
    "seq-mean-token-sum": "sum over tokens / num_samples",
    "seq-mean-token-mean": "sum over samples of (mean over tokens) / num_samples (GRPO's paper)",
    "seq-mean-token-sum-norm": "sum over tokens / num_samples / `rollout.max_response_tokens` (Dr.GRPO)",
}
"""Name of each mean -> its formula. The denominators belong to the whole mini-batch. The configuration reads
the names from this literal."""


def aggregate(
    token_loss: Tensor,
    mask: Tensor,
    lengths: Tensor,
    mode: str,
    *,
    num_tokens: float,
    num_samples: float,
    norm: float | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return this part's share of the mini-batch's loss.

    The denominators belong to the whole mini-batch, over all micro-batches and data parallel ranks.
    Therefore, if the mini-batch is split into parts of whole samples, the shares of the parts add up to its
    loss, and their gradients add up to its gradient. Sum the results over micro-batches and ranks; never
    average them. For example, with token-mean, a part with 10 of 40 tokens returns the sum over its tokens /
    40.

        token-mean               sum over tokens / num_tokens
        token-sum                sum over tokens
        seq-mean-token-sum       sum over tokens / num_samples
        seq-mean-token-mean      sum over samples of (mean over tokens) / num_samples
        seq-mean-token-sum-norm  sum over tokens / num_samples / norm

    token-mean is DAPO's (arXiv:2503.14476), seq-mean-token-mean GRPO's (arXiv:2402.03300), and
    seq-mean-token-sum-norm Dr.GRPO's (arXiv:2503.20783).

    Only unmasked tokens enter sums and means. A sample without unmasked tokens contributes 0.

    Args:
        token_loss: floating [T]; masked positions may hold anything, NaN included.
        mask: bool or 0/1 [T], the tokens that count.
        lengths: int64 [B].
        mode: one of the above.
        num_tokens: unmasked tokens of the whole mini-batch.
        num_samples: samples of the whole mini-batch. The caller decides whether samples without an unmasked
            token count.
        counts: floating [T], for each token the number of unmasked tokens of its sample. Needed if another
            part holds tokens of the same sample. None: the tokens are counted here.
        norm: a constant such as the maximum response length in tokens; seq-mean-token-sum-norm needs it.

    Returns:
        scalar of the dtype of `token_loss`. A denominator of 0 (an empty mini-batch) gives 0, not NaN.

    Raises:
        ValueError: unknown mode, or no positive norm where one is needed.
    """
    mask = mask.bool()
    token_loss = torch.where(mask, token_loss, 0.0)
    if mode == "token-mean":
        return token_loss.sum() / max(num_tokens, 1)
    if mode == "token-sum":
        return token_loss.sum()
    if mode == "seq-mean-token-sum":
        return token_loss.sum() / max(num_samples, 1)
    if mode == "seq-mean-token-mean":
        if counts is not None:
            return (token_loss / counts.clamp(min=1)).sum() / max(num_samples, 1)
        own = segment_sum(mask.to(token_loss.dtype), lengths)
        return (segment_sum(token_loss, lengths) / own.clamp(min=1)).sum() / max(num_samples, 1)
    if mode == "seq-mean-token-sum-norm":
        if norm is None or norm <= 0:
            raise ValueError(
                f"seq-mean-token-sum-norm needs norm > 0, such as the maximum response length, not {norm}"
            )
        return token_loss.sum() / max(num_samples, 1) / norm
    raise ValueError(f"aggregation mode {mode!r} is not one of {', '.join(MODES)}")
