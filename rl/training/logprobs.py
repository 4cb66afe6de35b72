"""Log-probs and entropy from hidden states: the output projection, the softmax and their gradients, fused in chunks.

T tokens, H hidden, V vocabulary. Logits exist for `chunk` tokens at a time, as float32 [chunk, V/tp]; the backward pass
computes them again instead of keeping them. Memory is O(chunk * V/tp) where the textbook's is O(T * V), for one more
projection in the backward pass.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, vocab_size: int, group, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), entropy and sum of squared probabilities of p = softmax(hidden @ weight.T / temperature).

    hidden [T, H], whole on every rank of the tensor parallel group; its gradient is this rank's part, to be summed over
    the group by the caller. weight [Vpad/tp, H], the rank's rows of the padded head. targets int64 [T] in 0..vocab_size.
    Rows beyond vocab_size only pad and get no probability. Returns logprobs, entropy and sum of p^2, float32 [T] each, equal
    on every rank of the group; the last has no gradient. Forward and backward are collective over `group` (backward only by the caller's sum).
    """
    first_row = group.rank() * weight.shape[0]
    real_rows = max(0, min(weight.shape[0], vocab_size - first_row))
    return _LinearLogprobs.apply(hidden, weight, targets, temperature, first_row, real_rows, group, chunk)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, first_row, real_rows, group, chunk):
        local_targets, is_local = _localise(targets, first_row, real_rows)
        rows = weight[:real_rows]
        logprobs, entropy, squares, lse = (
            torch.empty(len(targets), dtype=torch.float32, device=hidden.device) for _ in range(4)
        )
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], rows, temperature)
            largest = logits.amax(-1) if real_rows else logits.new_full((len(logits),), float("-inf"))
            if group.size() > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            logits.sub_(
                largest[:, None]
            )  # all that follows is relative to the largest logit: no digits are lost to an offset
            weights = logits.exp()
            target_logits = _pick(logits, local_targets[part], is_local[part])
            sums = torch.stack(
                [
                    weights.sum(-1),
                    torch.linalg.vecdot(weights, weights),
                    weights.mul_(logits).sum(-1),
                    target_logits,
                ]
            )
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
            total, squared, weighted, target_logits = sums
            squares[part] = squared / total.square()
            lse[part] = largest + total.log()
            logprobs[part] = target_logits - total.log()
            entropy[part] = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, local_targets, is_local, lse, entropy)
        ctx.temperature, ctx.real_rows, ctx.chunk = temperature, real_rows, chunk
        ctx.mark_non_differentiable(squares)
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, _):
        """With p the softmax and l its logarithm: d logp(y)/d logits = onehot(y) - p; d entropy/d logits = -p * (l + entropy)."""
        hidden, weight, local_targets, is_local, lse, entropy = ctx.saved_tensors
        rows = weight[: ctx.real_rows]
        one_chunk = len(hidden) <= ctx.chunk
        grad_hidden = torch.empty_like(hidden)
        # Several chunks are summed in float32, whatever the weight's type.
        grad_weight = torch.zeros(
            weight.shape, dtype=weight.dtype if one_chunk else torch.float32, device=weight.device
        )
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _logits(hidden[part], rows, ctx.temperature).sub_(lse[part, None])
            p = log_p.exp()
            grad = -p * grad_logprobs[part, None]
            at = is_local[part].nonzero().squeeze(1)
            grad[at, local_targets[part][at]] += grad_logprobs[part][at]
            grad -= p * (log_p + entropy[part, None]) * grad_entropy[part, None]
            grad = (grad / ctx.temperature).to(weight.dtype)
            grad_hidden[part] = grad @ rows
            grad_weight[: ctx.real_rows] += grad.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _logits(hidden, rows, temperature):
    """float32 [chunk, rows]; the projection itself in the weight's type, as the generation engine does it."""
    return (hidden @ rows.T).float().div_(temperature)


def _localise(targets, first_row, real_rows):
    """Row of each target on this rank (0 where it is not) and whether it is on this rank."""
    local = targets - first_row
    is_local = (local >= 0) & (local < real_rows)
    return local.masked_fill(~is_local, 0), is_local


def _pick(logits, local_targets, is_local):
    """The logit of the target where this rank holds it, else 0."""
    if logits.shape[1] == 0:
        return logits.new_zeros(len(logits))
    return logits.gather(1, local_targets[:, None]).squeeze(1).masked_fill(~is_local, 0.0)
