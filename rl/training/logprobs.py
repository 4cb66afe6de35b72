"""Log-probs and entropy from hidden states: output projection, softmax and their gradients, in chunks.

T tokens, H hidden, V vocabulary. Logits [chunk, V/tp] exist for `chunk` tokens at a time, in the weight's
dtype. If one chunk holds all tokens, the backward pass reuses its logits. Otherwise the backward pass
computes the logits again: memory is then O(chunk * V/tp) instead of O(T * V), at the cost of one more
projection.

On CUDA, one Triton kernel per direction reads the logits once (`rl.training.head_kernels`). The functions
here are the CPU path and the reference in tests of the kernels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl.training.extras import LogitsFilter

OUTPUTS = ("logprobs", "entropy", "sum_p_squared")
"""Names of the outputs: log p(target), entropy, sum of squared probabilities."""
FLOOR = -1e20
"""Logit of an entry to ignore, such as padding or an excluded token. Its probability is 0, and sums of such
logits are finite in float32."""


@dataclass(frozen=True)
class Softmax:
    """The distribution p = softmax(hidden @ weight.T / temperature) of a head, and how it is computed.

    hidden is [T, H], whole on every rank of the group. weight is [Vpad/tp, H], the rank's rows of the padded
    head.
    """

    temperature: float
    vocab_size: int
    """Number of rows of the whole head without the padding, whose probability is 0."""
    group: dist.ProcessGroup
    """The tensor parallel group."""
    chunk: int
    """Number of tokens whose logits exist at a time."""

    def own_rows(self, weight: Tensor) -> tuple[int, int]:
        """Return the first row of this rank's part of the head, and its number of rows without padding."""
        first = self.group.rank() * len(weight)
        return first, max(0, min(len(weight), self.vocab_size - first))

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Yield the parts of the tokens whose logits exist at a time."""
        for start in range(0, num_tokens, self.chunk):
            yield slice(start, start + self.chunk)

    def scaled_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return logits / temperature of a chunk on this rank, float32 [c, Vpad/tp]; FLOOR for padding."""
        x = (hidden @ weight.T).float()
        x = x / self.temperature if self.temperature != 1.0 else x
        x[:, self.own_rows(weight)[1] :] = FLOOR
        return x


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softmax: Softmax,
    *,
    outputs: tuple[str, ...] = OUTPUTS,
    logits_filter: LogitsFilter | None = None,
    cap: float | None = None,
) -> tuple[Tensor, ...]:
    """Return the named outputs, a subset of OUTPUTS, float32 [T] each.

    The probabilities are those of `softmax`, renormalised over the tokens that `logits_filter` keeps.

    hidden: [T, H]. The backward pass gives `hidden` only this rank's part of the gradient; the caller sums
        the parts over the group.
    weight: [Vpad/tp, H]. targets: int64 [T], below vocab_size.
    logits_filter: excludes tokens at each of the T positions, but never a target. None: keeps all tokens.
    cap: replaces the logits by cap * tanh(logits / cap); None: does not.

    The results are identical on all ranks of the group; the sum of squares has no gradient. Outputs that are
    not named cost nothing, and neither do gradients of outputs that the loss does not use. The forward pass
    is collective over the group (one all-gather); the backward pass is not.
    """
    keep = torch.is_grad_enabled() and len(targets) <= softmax.chunk
    wanted = ("entropy" in outputs, "sum_p_squared" in outputs)
    head = _Head(softmax, wanted, keep, logits_filter, cap)
    found = dict(zip(OUTPUTS, _LinearLogprobs.apply(hidden, weight, targets, head)))
    return tuple(found[name] for name in outputs)


class _Head(NamedTuple):
    softmax: Softmax
    wanted: tuple[bool, bool]
    """Whether (the entropy, the sum of squares) is requested."""
    keep: bool
    """Whether the backward pass reuses the logits."""
    logits_filter: LogitsFilter | None
    cap: float | None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        softmax, wanted, keep, logits_filter, cap = head
        first_row, rows = softmax.own_rows(weight)
        local_targets = targets - first_row
        local_targets = torch.where(local_targets < rows, local_targets, -1).clamp_(min=-1)
        statistics, _ = _functions(hidden)
        found = hidden.new_zeros(3 + sum(wanted), len(targets), dtype=torch.float32)
        found[0].fill_(torch.finfo(torch.float32).min)  # the maximum over no rows
        local = None if logits_filter is None else logits_filter.on_rows(first_row, rows, hidden.device)
        saved = None
        for part in softmax.chunks(len(targets) if rows else 0):
            logits = _capped(hidden[part] @ weight[:rows].T, cap)
            if local is not None:
                local.restrict(logits, part)
            statistics(logits, softmax.temperature, local_targets[part], wanted, found[:, part])
            saved = logits if keep else None
        logprobs, lse, entropy, squares = _combine(found, targets // len(weight), softmax.group, wanted)
        ctx.save_for_backward(hidden, weight, local_targets, lse, entropy, saved)
        ctx.head, ctx.real_rows, ctx.filter = head, rows, local
        ctx.set_materialize_grads(False)
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        return logprobs, entropy, squares

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, local_targets, lse, entropy, saved = ctx.saved_tensors
        gradient = _functions(hidden)[1]
        rows, softmax, cap = weight[: ctx.real_rows], ctx.head.softmax, ctx.head.cap
        one_chunk = len(hidden) <= softmax.chunk
        grad_hidden = torch.empty_like(hidden) if ctx.real_rows else torch.zeros_like(hidden)
        dtype = weight.dtype if one_chunk else torch.float32  # several chunks are summed in float32
        learns = ctx.needs_input_grad[1]  # not with adapters
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if learns else None
        for part in softmax.chunks(len(hidden) if ctx.real_rows else 0):
            logits = _capped(hidden[part] @ rows.T, cap) if saved is None else saved
            if ctx.filter is not None and saved is None:
                ctx.filter.restrict(logits, part)
            slope = None if cap is None else 1 - (logits / cap).clamp(min=-1.0).square()
            grad = gradient(
                logits,
                softmax.temperature,
                local_targets[part],
                lse[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else (entropy[part], grad_entropy[part]),
            )
            if slope is not None:
                grad *= slope
            torch.mm(grad, rows, out=grad_hidden[part])
            if grad_weight is None:
                continue
            if one_chunk:
                torch.mm(grad.T, hidden, out=grad_weight[: ctx.real_rows])
            else:
                add_product(grad_weight[: ctx.real_rows], grad.T, hidden[part])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None


def statistics(
    logits: Tensor, temperature: float, targets: Tensor, wanted: tuple[bool, bool], out: Tensor
) -> None:
    """Write the statistics of a rank's scaled logits x = logits / temperature [c, rows] to `out` [n, c].

    The rows of `out` are m = max x, sum exp(x - m) and the target's x - m. Then follow, if `wanted`,
    sum exp(x - m) (x - m) for the entropy and sum exp(x - m)^2 for the sum of squares.

    targets: int64 [c], the target's row on this rank, or -1 if another rank has it; its x - m is then 0.
    wanted: whether (the entropy, the sum of squares) is requested. out: float32.
    """
    x = logits.float()
    if temperature != 1.0:
        x = x / temperature
    largest = x.amax(-1)
    x = x - largest[:, None]  # prevents overflow and loss of precision for large logits
    target = x.gather(1, targets.clamp(min=0)[:, None]).squeeze(1).masked_fill_(targets < 0, 0.0)
    powers = x.exp() if wanted[0] else x.exp_()
    found = [largest, powers.sum(-1), target]
    if wanted[0]:
        found.append(x.mul_(powers).sum(-1))
    if wanted[1]:
        found.append(torch.linalg.vecdot(powers, powers))
    torch.stack(found, out=out)


def gradient(
    logits: Tensor,
    temperature: float,
    targets: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the gradient of the loss with respect to the logits, in their dtype. May overwrite the logits.

    d logp(y)/d logits = onehot(y) - p,    d entropy/d logits = -p * (log p + entropy)

    lse: log sum exp of the scaled logits over the whole vocabulary, float32 [c].
    of_entropy: (entropy, gradient of the loss with respect to it), None if the loss does not use it.
    """
    log_p = logits.float()
    if temperature != 1.0:
        log_p.div_(temperature)
    log_p.sub_(lse[:, None])
    mine = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs / temperature
    if of_entropy is None:
        grad = log_p.exp_().mul_(-mine[:, None])
    else:
        entropy, upstream = of_entropy[0], of_entropy[1] / temperature
        p = log_p.exp()
        grad = log_p.add_(entropy[:, None]).mul_(upstream[:, None]).add_(mine[:, None]).mul_(p).neg_()
    grad.scatter_add_(1, targets.clamp(min=0)[:, None], mine.masked_fill(targets < 0, 0.0)[:, None])
    return grad.to(logits.dtype)


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _functions(hidden: Tensor) -> tuple[Callable[..., None], Callable[..., Tensor]]:
    """Return `statistics` and `gradient` for the device of `hidden`: on CUDA, the Triton kernels."""
    if hidden.is_cuda:
        from rl.training import head_kernels

        return head_kernels.statistics, head_kernels.gradient
    return statistics, gradient


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to the float32 `total`, on CUDA and for float32 without a temporary product."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def gathered(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks of the group, [tp, *shape]. Collective over `group`.

    Not collective if the tensors are empty: a micro-batch may have no response token.
    """
    if group.size() == 1:
        return local[None]
    parts = local.new_empty(group.size(), *local.shape)
    if local.numel():
        dist.all_gather_into_tensor(parts.view(-1, *local.shape[1:]), local.contiguous(), group=group)
    return parts


def _combine(
    found: Tensor, owners: Tensor, group: dist.ProcessGroup, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return (logprobs, log sum exp, entropy or None, sum of squares or None) [T] of the whole vocabulary.

    found: [n, T], this rank's statistics. owners: int64 [T], the rank that holds the target's row.
    """
    parts = gathered(found, group)
    largest = parts[:, 0].amax(0)
    below = parts[:, 0] - largest
    scale = below.exp()
    total = (parts[:, 1] * scale).sum(0)
    log_total = total.log()
    at = owners[None]
    logprobs = (parts[:, 2].gather(0, at) + below.gather(0, at))[0] - log_total
    entropy = squares = None
    if wanted[0]:
        entropy = log_total - ((parts[:, 3] + below * parts[:, 1]) * scale).sum(0) / total
    if wanted[1]:
        squares = (parts[:, -1] * scale.square()).sum(0) / total.square()
    return logprobs, largest + log_total, entropy, squares
