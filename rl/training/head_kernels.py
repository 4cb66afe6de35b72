"""Triton kernels of the log-prob head.

One kernel computes the statistics of a chunk of logits. The other overwrites the logits with their gradient.
They compute the same as `statistics` and `gradient` of `rl.training.logprobs`, but read each logit once and
make no float32 copy of the logits. This file is imported on CUDA only; tests run the kernels in Triton's
interpreter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Number of logits that a program reads at once: 16 per thread, which fit in its registers."""
WARPS = 8


def statistics(
    logits: Tensor, temperature: float, targets: Tensor, wanted: tuple[bool, bool], out: Tensor
) -> None:
    """Compute `rl.training.logprobs.statistics` in one kernel, with the same arguments."""
    tokens, rows = logits.shape
    _statistics[(tokens,)](
        logits,
        targets,
        out,
        rows,
        logits.stride(0),
        out.stride(0),
        temperature,
        SCALED=temperature != 1.0,
        ENTROPY=wanted[0],
        SQUARES=wanted[1],
        BLOCK=min(BLOCK, triton.next_power_of_2(rows)),
        num_warps=WARPS,
    )


def gradient(
    logits: Tensor,
    temperature: float,
    targets: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Compute `rl.training.logprobs.gradient` in one kernel, with the same arguments."""
    tokens, rows = logits.shape
    mine = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs / temperature
    entropy, upstream = (lse, lse) if of_entropy is None else (of_entropy[0], of_entropy[1] / temperature)
    block = min(BLOCK, triton.next_power_of_2(rows))
    _gradient[(tokens, triton.cdiv(rows, block))](
        logits,
        targets,
        lse,
        mine,
        entropy,
        upstream,  # read only with ENTROPY, as is entropy
        rows,
        logits.stride(0),
        temperature,
        SCALED=temperature != 1.0,
        ENTROPY=of_entropy is not None,
        BLOCK=block,
        num_warps=WARPS,
    )
    torch.autograd.graph.increment_version(logits)  # so that a second backward pass raises an error
    return logits


@triton.jit
def _statistics(
    logits,
    targets,
    out,
    rows,
    row_stride,
    out_stride,
    temperature,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the statistics of one token per program. Sums are rescaled if a block has a larger logit."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * row_stride
    columns = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    squared = tl.zeros((), tl.float32)
    for start in range(0, rows, BLOCK):
        inside = start + columns < rows
        x = tl.load(row + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        if SCALED:
            x = x / temperature
        new = tl.maximum(largest, tl.max(x, 0))
        # For the first block `largest` is -inf, and 0 * -inf would be NaN.
        below = tl.where(largest == float("-inf"), 0.0, largest - new)
        scale = tl.exp(below)
        x = x - new
        power = tl.exp(x)
        if ENTROPY:
            weighted = (weighted + below * total) * scale + tl.sum(tl.where(inside, power * x, 0.0), 0)
        if SQUARES:
            squared = squared * scale * scale + tl.sum(power * power, 0)
        total = total * scale + tl.sum(power, 0)
        largest = new
    target = tl.load(targets + token)
    at = tl.load(row + tl.maximum(target, 0)).to(tl.float32)
    if SCALED:
        at = at / temperature
    tl.store(out + token, largest)
    tl.store(out + out_stride + token, total)
    tl.store(out + 2 * out_stride + token, tl.where(target < 0, 0.0, at - largest))
    if ENTROPY:
        tl.store(out + 3 * out_stride + token, weighted)
    if SQUARES:
        tl.store(out + (3 + ENTROPY) * out_stride + token, squared)


@triton.jit
def _gradient(
    logits,
    targets,
    lse,
    grad_logprobs,
    entropy,
    grad_entropy,
    rows,
    row_stride,
    temperature,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of one token and one block of logits per program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < rows
    at = logits + token * row_stride + columns
    log_p = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    if SCALED:
        log_p = log_p / temperature
    log_p = log_p - tl.load(lse + token)
    p = tl.exp(log_p)
    upstream = tl.load(grad_logprobs + token)
    factor = upstream
    if ENTROPY:
        factor = upstream + tl.load(grad_entropy + token) * (log_p + tl.load(entropy + token))
    grad = tl.where(columns == tl.load(targets + token), upstream, 0.0) - p * factor
    tl.store(at, grad.to(logits.dtype.element_ty), mask=inside)
