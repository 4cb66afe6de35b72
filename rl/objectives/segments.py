"""Reductions over samples that lie end to end in one flat tensor, and their transpose.

Shapes: `T` response tokens of `B` samples, laid end to end; `lengths` int64 [B] is the number of tokens of
each sample, zeros allowed.

A segment is the tokens of one sample. Each obvious implementation of a segment sum has a fault. `index_add`
and the backward pass of `repeat_interleave` use atomic additions on CUDA, so the result changes from run to
run. A difference of `cumsum` loses digits and carries a NaN from one sample into all later samples.
`torch.segment_reduce` sums each segment in a fixed order. But it rejects B == 0, and on CUDA its own backward
pass walks through a segment with a single thread. The segment sum and `expand` are transposes of each other.
Therefore each of them is used as the backward pass of the other. Both are deterministic, and differentiable
any number of times. For example, with lengths [2, 1] the sum of [1, 2, 3] is [3, 3], and `expand` turns [5,
7] into [5, 5, 7].
"""

from typing import Any

import torch
from torch import Tensor


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(lengths)
        ctx.total = len(x)
        return _reduce(x, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (lengths,) = ctx.saved_tensors
        return _Expand.apply(grad, lengths, ctx.total), None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, per_sample: Tensor, lengths: Tensor, total: int | None) -> Tensor:
        ctx.save_for_backward(lengths)
        return torch.repeat_interleave(per_sample, lengths, output_size=total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (lengths,) = ctx.saved_tensors
        return _SegmentSum.apply(grad, lengths), None, None


def _reduce(x: Tensor, lengths: Tensor) -> Tensor:
    if len(lengths) == 0:
        assert len(x) == 0, f"{len(x)} tokens, but no sample to hold them"
        return x.new_zeros(0)
    # float64 is used because on CPU the sum of a segment is serial, so float32 would lose digits on long
    # responses. segment_reduce checks that lengths are not negative and sum to T. On CUDA the check is
    # off, because it would make the host wait for the device.
    x64 = x.contiguous().double()
    return torch.segment_reduce(x64, "sum", lengths=lengths, unsafe=x.is_cuda).to(x.dtype)


def segment_sum(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each sample's tokens: x [T] floating, lengths int64 [B] -> [B] of x's dtype.

    Sums in float64. An empty sample gives 0; a NaN stays within its sample. On the CPU it raises RuntimeError
    if lengths do not sum to T.
    """
    return _SegmentSum.apply(x, lengths)


def segment_mean(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean over each sample's tokens: x [T] floating, lengths int64 [B] -> [B] of x's dtype. An
    empty sample gives 0."""
    return segment_sum(x, lengths) / lengths.clamp(min=1)


def expand(per_sample: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """Return for each token the value of its sample: per_sample [B] floating, lengths int64 [B] -> [T] of the
    same dtype.

    total: T. If None, the host waits for the device to sum the lengths.
    """
    assert per_sample.shape == lengths.shape, (
        f"{tuple(per_sample.shape)} values for {tuple(lengths.shape)} lengths"
    )
    return _Expand.apply(per_sample, lengths, total)
