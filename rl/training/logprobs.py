"""Log-probs and entropy from hidden states: output projection, softmax and their gradients, fused in chunks.

T tokens, H hidden, V vocabulary. Logits exist for `chunk` tokens at a time, as float32 [chunk, V/tp]; the
backward pass recomputes them. Memory is O(chunk * V/tp) instead of O(T * V); the cost is one more projection
in the backward pass.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, vocab_size: int, group, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(target), entropy and sum of squared probabilities, float32 [T] each.

    p = softmax(hidden @ weight.T / temperature)

    hidden: [T, H], whole on every rank of the tensor parallel group. Its gradient is this rank's part; the
        caller sums it over the group.
    weight: [Vpad/tp, H], the rank's rows of the padded head.
    targets: int64 [T], below vocab_size. Rows from vocab_size on are padding with probability 0.

    The results are identical on all ranks of the group; the sum of squares has no gradient. The forward pass
    is collective over `group`; the backward pass is not.
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
            logits.sub_(largest[:, None])  # prevents overflow and loss of precision for large logits
            weights = logits.exp()
            target_logits = _pick(logits, local_targets[part], is_local[part])
            total, squared = weights.sum(-1), torch.linalg.vecdot(weights, weights)
            sums = torch.stack([total, squared, weights.mul_(logits).sum(-1), target_logits])
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
        """Compute the gradients.

        d logp(y)/d logits = onehot(y) - p,    d entropy/d logits = -p * (log p + entropy)
        """
        hidden, weight, local_targets, is_local, lse, entropy = ctx.saved_tensors
        rows = weight[: ctx.real_rows]
        one_chunk = len(hidden) <= ctx.chunk
        grad_hidden = torch.empty_like(hidden)
        dtype = weight.dtype if one_chunk else torch.float32  # several chunks are summed in float32
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
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
    """Return float32 [chunk, rows]. The projection uses the weight's dtype, as in the generation engine."""
    return (hidden @ rows.T).float().div_(temperature)


def _localise(targets, first_row, real_rows):
    """Return (row, is_local) of each target: its row on this rank, 0 if another rank holds it."""
    local = targets - first_row
    is_local = (local >= 0) & (local < real_rows)
    return local.masked_fill(~is_local, 0), is_local


def _pick(logits, local_targets, is_local):
    """Return the logit of each target that this rank holds, 0 for the others."""
    if logits.shape[1] == 0:
        return logits.new_zeros(len(logits))
    return logits.gather(1, local_targets[:, None]).squeeze(1).masked_fill(~is_local, 0.0)
