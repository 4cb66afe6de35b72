"""Computes the divergence of a policy from its teacher, from the hidden states of both, in chunks of tokens.

Letters in shapes: T tokens, H hidden size, V vocabulary size, k `teacher.top_k`. As in
`rl.training.logprobs`, logits [chunk, V/tp] exist for only `chunk` tokens at a time, and the backward pass
computes them again.

Teacher and policy share the training grid, and each sample is computed by the same data parallel rank in
both. The last stage keeps the results of the teacher's pass for each token in host memory, until the policy's
update reads them. Nothing travels between ranks. The results are:

- whole vocabulary: the teacher's last hidden state, H numbers instead of V (for Qwen3-0.6B, 1,024 instead of
  151,936). The update multiplies it with the teacher's rows of the head on this rank, for the same tokens as
  the policy's rows.
- top_k: ids and log-probs of k tokens, and one log-prob for all other tokens together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rl.checks.head import check_head
from rl.config.run_models import RunModel
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.objectives.distillation import Divergence
from rl.training.extras import HeadOutput
from rl.training.logprobs import FLOOR, Softmax, add_product, gathered, linear_logprobs
from rl.training.packing import MicroBatch
from rl.training.parts import TrainerPart

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine


NUM_COMPARED = 16
"""Maximum number of the teacher's tokens in the check of the head."""


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    divergence: Divergence,
    softmax: Softmax,
) -> Tensor:
    """Return the divergence of p and q at each token over the whole vocabulary, float32 [T].

    p is the `softmax` of hidden and weight, q the one of teacher_hidden and teacher_weight.

    hidden: [T, H]. Its gradient is this rank's part; the caller sums it over the group. teacher_hidden: [T, H
        of the teacher], without gradient.
    weight: [Vpad/tp, H]. teacher_weight: the teacher's for the same rows.

    Both passes compute the logits of both models. The forward pass is collective over the group; the backward
    pass is not.
    """
    return _Whole.apply(hidden, weight, teacher_hidden, teacher_weight, divergence, softmax)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        divergence: Divergence,
        softmax: Softmax,
    ) -> Tensor:
        found = hidden.new_zeros(2, len(hidden), dtype=torch.float32)
        totals = torch.zeros_like(found)
        for part in softmax.chunks(len(hidden)):
            x = softmax.scaled_logits(hidden[part], weight)
            y = softmax.scaled_logits(teacher_hidden[part], teacher_weight)
            local = torch.stack([x.logsumexp(-1), y.logsumexp(-1)])
            totals[:, part] = gathered(local, softmax.group).logsumexp(0)
            log_p, log_q = x.sub_(totals[0, part, None]), y.sub_(totals[1, part, None])
            terms, slopes = divergence(log_p, log_q)
            found[:, part] = torch.stack([terms.sum(-1), slopes.sum(-1)])
        if len(hidden):  # the same on all ranks of the group
            dist.all_reduce(found, group=softmax.group)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, totals, found[1])
        ctx.options = divergence, softmax
        return found[0].clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, teacher_hidden, teacher_weight, totals, slope_sums = ctx.saved_tensors
        divergence, softmax = ctx.options

        def gradient(part: slice) -> Tensor:
            log_p = softmax.scaled_logits(hidden[part], weight).sub_(totals[0, part, None])
            log_q = softmax.scaled_logits(teacher_hidden[part], teacher_weight)
            slopes = divergence(log_p, log_q.sub_(totals[1, part, None]))[1]
            return slopes - log_p.exp() * slope_sums[part, None]

        return *_through_head(ctx, gradient, upstream, softmax), *[None] * 4


def top_k_divergence(
    hidden: Tensor, weight: Tensor, ids: Tensor, log_q: Tensor, divergence: Divergence, softmax: Softmax
) -> Tensor:
    """Return the divergence of p and q at each token over k tokens and all other tokens together, float32
    [T].

    All other tokens are one more outcome, with the sum of their probabilities. For example, with k=2 the
    probabilities 0.6, 0.3, 0.06 and 0.04 become 0.6, 0.3 and 0.1. The divergence of such coarser
    distributions is at most the divergence over the whole vocabulary (data processing inequality), and is 0
    only if p and q agree on the k tokens. It is never negative, while a sum of the k terms alone may be
    negative. Its gradient lowers or raises the probabilities of all other tokens in proportion.

    ids: int64 [T, k]. log_q: float32 [T, k + 1], log-probs of these tokens and of all other tokens together
    (`top_k`). Other arguments and collectives as for `linear_divergence`.
    """
    return _TopK.apply(hidden, weight, ids, log_q, divergence, softmax)


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        log_q: Tensor,
        divergence: Divergence,
        softmax: Softmax,
    ) -> Tensor:
        first, real_rows = softmax.own_rows(weight)
        rows = ids - first
        # A token of another rank gets the place after the last row.
        places = torch.where((rows >= 0) & (rows < real_rows), rows, len(weight))
        local = torch.empty_like(log_q)
        for part in softmax.chunks(len(hidden)):
            x = F.pad(softmax.scaled_logits(hidden[part], weight), (0, 1), value=FLOOR)
            local[part, :-1] = x.gather(1, places[part])
            local[part, -1] = x.scatter_(1, places[part], FLOOR).logsumexp(-1)
        scores = gathered(local, softmax.group).logsumexp(0)
        total = scores.logsumexp(-1, keepdim=True)
        log_p = scores - total
        terms, slopes = divergence(log_p, log_q)
        ctx.save_for_backward(hidden, weight, places, slopes, log_p, total)
        ctx.softmax = softmax
        return terms.sum(-1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, places, slopes, log_p, total = ctx.saved_tensors
        softmax = ctx.softmax
        slope_sums = slopes.sum(-1, keepdim=True)
        chosen = (slopes - log_p.exp() * slope_sums)[:, :-1]
        # The other tokens share one slope; each token's share is p_i / (sum of p of all other tokens).
        of_others = (slopes[:, -1] - log_p[:, -1].exp() * slope_sums[:, 0])[:, None]

        def gradient(part: slice) -> Tensor:
            x = F.pad(softmax.scaled_logits(hidden[part], weight), (0, 1), value=FLOOR)
            share = x.sub_(total[part] + log_p[part, -1:]).clamp_(max=0.0).exp_()
            return share.mul_(of_others[part]).scatter_(1, places[part], chosen[part])[:, :-1]

        return *_through_head(ctx, gradient, upstream, softmax), *[None] * 4


def top_k(hidden: Tensor, weight: Tensor, softmax: Softmax, k: int) -> tuple[Tensor, Tensor]:
    """Return ids int64 [T, k] of the k most probable tokens, and log-probs float32 [T, k + 1].

    The last log-prob belongs to all other tokens together. k must be below vocab_size. Arguments and
    collectives as for `linear_divergence`.
    """
    first, group = softmax.own_rows(weight)[0], softmax.group
    width = min(k, len(weight))
    ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
    local = torch.full((len(hidden), k + 1), FLOOR, device=hidden.device)
    for part in softmax.chunks(len(hidden)):
        x = softmax.scaled_logits(hidden[part], weight)
        local[part, :width], found = x.topk(width)
        ids[part, :width] = found + first
        local[part, -1] = x.scatter_(1, found, FLOOR).logsumexp(-1)
    candidates = gathered(local, group)
    scores, chosen = candidates[..., :-1].transpose(0, 1).flatten(1).topk(k)
    ids = gathered(ids, group).transpose(0, 1).flatten(1).gather(1, chosen)
    left = candidates[..., :-1].transpose(0, 1).flatten(1).scatter(1, chosen, FLOOR)
    others = torch.cat([left, candidates[..., -1].T], dim=1).logsumexp(-1, keepdim=True)
    return ids, torch.cat([scores, others], dim=1).log_softmax(-1)


def head_rows(weight: Tensor, wanted: int, group: dist.ProcessGroup) -> Tensor:
    """Return the rank's rows of a teacher's head, for a policy with `wanted` rows on each rank.

    A teacher of another size may have more rows for the same tokens. For example, Qwen2.5-7B has 152,064 rows
    and Qwen2.5-0.5B 151,936. Collective over `group`.
    """
    if len(weight) == wanted:
        return weight.detach().clone()
    whole = gathered(weight.detach(), group).flatten(0, 1)
    return whole[group.rank() * wanted :][:wanted].clone()


@dataclass
class Targets:
    """Results of the teachers' passes at the response tokens of this rank, on the last stage."""

    divergence: Divergence
    teachers: list[int]
    """Index in `heads` of each sample's teacher, [N]; 0 with top_k."""
    top_k: int = 0
    """`teacher.top_k`; 0: the divergence is over the whole vocabulary."""
    heads: list[Tensor] = field(default_factory=list)
    """Whole vocabulary: the rank's rows of each teacher's head, on the device."""
    checks: list[Callable[[], None]] = field(default_factory=list)
    """Functions that compare one sample of each teacher again. Collective over the world."""
    rows: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Sample -> hidden states [R_i, H], on the host; with top_k, ids [R_i, k] and log-probs [R_i, k + 1]."""

    def logprobs(self, sample: int, ids: Tensor, teacher: int, softmax: Softmax) -> Tensor:
        """Return the log-probs of a sample's tokens, float32 [R]; NaN for tokens outside of top_k.

        ids: int64 [R]. teacher: index in `heads`. Other arguments and collectives as for `linear_divergence`.
        """
        first, *rest = self.rows[sample]
        if self.top_k:
            hits = first == ids[:, None]
            return torch.where(hits.any(-1), (rest[0][:, :-1] * hits).sum(-1), torch.nan)
        head = self.heads[teacher]
        ids, hidden = ids.to(head.device), first.to(head.device)
        return linear_logprobs(hidden, head, ids, softmax, outputs=("logprobs",))[0].cpu()

    def of(self, samples: list[int], device: torch.device) -> "MicroTargets":
        """Return the targets of a micro-batch with these samples, in their order."""
        lengths = torch.tensor([len(self.rows[i][0]) for i in samples], dtype=torch.int64)
        teachers = torch.tensor([self.teachers[i] for i in samples], dtype=torch.int64)
        parts = []
        for number in sorted(set(teachers.tolist())):
            places = (teachers == number).repeat_interleave(lengths).nonzero().squeeze(1)
            own = [self.rows[i] for i in samples if self.teachers[i] == number]
            columns = [torch.cat(column).to(device) for column in zip(*own)]
            head = tuple(self.heads[number : number + 1])
            parts.append((places.to(device), tuple(columns), head))
        return MicroTargets(self.divergence, linear_divergence if self.heads else top_k_divergence, parts)


class TeacherTargets(TrainerPart):
    """Gives the head the teachers' distributions in passes that compute the divergence."""

    given: tuple[Batch, Targets] | None = None
    """Batch and targets of the step, until the step's metrics are read."""

    def attach(self, engine: "TrainingEngine") -> None:
        self._model = engine.chunks[-1]

    def check(self, engine: "TrainingEngine", name: str) -> None:
        if self.given is not None:
            targets = self.given[1]
            tokens = partial(top_k, k=min(targets.top_k, NUM_COMPARED)) if targets.top_k else None
            linear = top_k_divergence if tokens else linear_divergence
            check_head(engine, linear=linear, of=targets.divergence, tokens=tokens)

    def outputs(self, batch: Batch) -> tuple[str, ...]:
        return (MicroTargets.name,) if self.given is not None and self.given[0] is batch else ()

    def micro_batch(self, batch: Batch, micro: MicroBatch) -> None:
        if MicroTargets.name in self._model.outputs:
            assert self.given is not None
            micro.extras = micro.extras.plus(self.given[1].of(micro.samples, micro.tokens.device))

    def metrics(self) -> dict[str, float]:
        for check in () if self.given is None else self.given[1].checks:
            check()
        self.given = None
        return {}


@dataclass
class MicroTargets(HeadOutput):
    """The targets of a micro-batch of R response tokens, on the device. Calling them gives the divergence."""

    name = "divergence"
    divergence: Divergence
    function: Callable[..., Tensor]
    """linear_divergence or top_k_divergence."""
    parts: list[tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]]
    """For each teacher: indices of its tokens, int64 [n], ascending; arguments of `function` with one row per
    token; and the teacher's head, if `function` reads it."""

    def of(self, index: Tensor) -> "MicroTargets":
        parts = []
        for places, rows, head in self.parts:
            index = index.to(places.device)
            mine = torch.isin(places, index)
            parts.append((torch.searchsorted(index, places[mine]), tuple(x[mine] for x in rows), head))
        return MicroTargets(self.divergence, self.function, parts)

    def __call__(self, hidden: Tensor, weight: Tensor, softmax: Softmax) -> Tensor:
        """Return the divergence at each token, float32 [R]. Arguments as for `linear_divergence`."""
        if not self.parts:  # no samples: the gradients are 0, but pipeline and reductions need them
            return hidden.float().sum(-1) + weight[:0].float().sum()
        out = hidden.new_zeros(len(hidden), dtype=torch.float32)
        for places, rows, head in self.parts:
            own = hidden.index_select(0, places)
            found = self.function(own, weight, *rows, *head, divergence=self.divergence, softmax=softmax)
            out = out.index_copy(0, places, found)
        return out


def _through_head(
    ctx: Any, gradient: Callable[[slice], Tensor], upstream: Tensor, softmax: Softmax
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of hidden [T, H] and weight, from the gradients of each chunk's scaled logits.

    ctx: context of a function that has saved hidden and weight, its first inputs. With adapters the weight is
    frozen, and has no gradient.
    """
    (hidden, weight, *_), learns = ctx.saved_tensors, ctx.needs_input_grad[1]
    grad_hidden = torch.empty_like(hidden)
    shape = weight.shape if learns else (0,)
    grad_weight = torch.zeros(shape, dtype=torch.float32, device=weight.device)
    upstream = upstream / softmax.temperature
    for part in softmax.chunks(len(hidden)):
        grad = (gradient(part) * upstream[part, None]).to(hidden.dtype)
        torch.mm(grad, weight, out=grad_hidden[part])
        if learns:
            add_product(grad_weight, grad.T, hidden[part])
    return grad_hidden, grad_weight.to(weight.dtype) if learns else None


def parts(config: Config, model: RunModel, base_of: "TrainingEngine | None") -> list[TrainerPart]:
    """Return the parts of a model in training."""
    return [TeacherTargets()] if model.name == "policy" else []
