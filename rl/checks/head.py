"""Compares the functions of a policy's head, and their gradients, with float64.

`linear_logprobs` and, with a teacher, `linear_divergence` are computed for random hidden states, in several
chunks. The second computation starts from the same logits, gathered over the tensor parallel ranks.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl.checks.batches import CheckFailed
from rl.runtime.collectives import gather_texts
from rl.training.engine import TrainingEngine
from rl.training.extras import LogitsFilter
from rl.training.logprobs import FLOOR, Softmax, gathered, linear_logprobs

TOKENS, ROWS = 64, 1024
"""Number of hidden states, each a chunk of its own, and maximum number of a rank's rows of the head."""
OUTPUT_ERROR = 2.0**-14
"""Maximum error of outputs, relative to the largest logit."""
GRADIENT_ERROR = {torch.float32: 2.0**-9, torch.bfloat16: 2.0**-8}
"""Maximum relative error of gradients. A sum that is rounded to bfloat16 after each chunk errs by 2^-7.5."""
OfTensor = Callable[[Tensor], Tensor]


class WrongHead(CheckFailed):
    """Raised on every rank if outputs or gradients of the head are not those of float64."""


def check_head(model: TrainingEngine, **teacher: Any) -> None:
    """Raise WrongHead if the head of a policy differs from float64. Collective over the world.

    teacher: arguments of `problems_of` for a policy with a teacher.
    """
    own, spec = model.chunks[-1], model.spec

    def problems(temperature: float | None = None) -> list[str]:
        if not own.post_process or getattr(own, "head", None) is not linear_logprobs:
            return []
        at, kinds = temperature or spec.temperature, (part.logits_filter for part in model.parts)
        filter_of = next(filter(None, kinds), None)
        group = model.grid.groups.tp
        return problems_of(own.head_weight, group, temperature=at, filter_of=filter_of, **teacher)

    if found := gather_texts(problems()):
        cause = "the softmax, " + "the exchange between tensor parallel ranks " * (model.grid.tp > 1)
        cause += "or a gradient is wrong, or a float32 value was rounded to the model's dtype"
        if spec.temperature != 1 and not gather_texts(problems(1.0)):
            cause = f"the temperature {spec.temperature:g} is applied wrongly, or to logits of 16 bits"
        raise WrongHead(f"head check: {found[0]}: {cause}.")


def problems_of(
    head: Tensor,
    group: dist.ProcessGroup,
    *,
    temperature: float,
    filter_of: Callable[..., LogitsFilter] | None = None,
    linear: Callable[..., Tensor] | None = None,
    of: Any = None,
    tokens: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> list[str]:
    """Return how results for random hidden states differ from float64. Collective over the group.

    head: this rank's rows of the head. filter_of: class of the policy's filter. linear, of: with a teacher
    `linear_divergence` and its kind. tokens: with `teacher.top_k` its function `top_k` of hidden states;
    linear is `top_k_divergence`.
    """
    weight = head.detach()[:ROWS].requires_grad_(head.requires_grad)
    vocab_size = len(weight) * group.size() - 3  # as if three rows were padding
    softmax = Softmax(temperature, vocab_size, group, chunk=1)
    generator = torch.Generator().manual_seed(5)
    hidden, other = torch.randn(2, TOKENS, weight.shape[1], generator=generator).to(weight)
    hidden *= 2 / _logits(hidden, weight.detach(), softmax).std(-1, keepdim=True).to(weight)
    targets = torch.randint(vocab_size, (TOKENS,), generator=generator).to(weight.device)

    thirds = torch.arange(vocab_size) + torch.arange(TOKENS)[:, None]
    excluded = thirds % 3 == 0
    excluded[1::4], excluded[2::4] = True, False  # sets of one token, which one rank holds, and of all
    excluded = excluded.to(weight.device).scatter(1, targets[:, None], False)

    def logprobs(hidden: Tensor, kept: LogitsFilter | None = None) -> Tensor:
        return torch.stack(linear_logprobs(hidden, weight, targets, softmax, logits_filter=kept))

    def expected(x: Tensor) -> Tensor:
        log_p = x.log_softmax(-1)
        p, own = log_p.exp(), log_p.gather(1, targets[:, None])[:, 0]
        return torch.stack((own, -(p * log_p).sum(-1), p.square().sum(-1).detach()))

    def problem(name: str, function: OfTensor, formula: OfTensor) -> str:
        """Return what differs between a function of hidden states and a formula of logits."""
        with torch.enable_grad():
            own = hidden.clone().requires_grad_()
            x = _logits(hidden, weight.detach(), softmax).requires_grad_()
            found, exact = function(own), formula(x)
            upstream = torch.linspace(0.5, 2, exact.numel(), device=x.device).view_as(exact)
            learned = [own, weight] if weight.requires_grad else [own]
            gradients = torch.autograd.grad((found * upstream).sum(), learned)
            (of_logits,) = torch.autograd.grad((exact * upstream).sum(), x)
        error = float((found.detach() - exact.detach()).abs().max() / (1 + x.detach().abs().max()))
        if not error <= OUTPUT_ERROR:
            return f"{name} differ from float64 by {error:.3g} of the largest logit"
        first, rows = softmax.own_rows(weight)
        rest = (of_logits[:, first : first + rows] / softmax.temperature).to(weight.dtype)
        pairs = {"hidden states": (gradients[0], (rest @ weight.detach()[:rows]).double())}
        if weight.requires_grad:
            pairs["weight of the head"] = gradients[1][:rows], rest.double().T @ hidden.double()
        for what, (gradient, other) in pairs.items():
            error = float((gradient - other).norm() / other.norm())
            if not error <= GRADIENT_ERROR[weight.dtype]:
                return f"the gradient of {name} for the {what} differs from float64 by {error:.3g}"
        return ""

    own_names = "log-probs, entropy and squared probabilities"
    cases: list[tuple[str, OfTensor, OfTensor]] = [(own_names, logprobs, expected)]
    if filter_of is not None:
        has_set, kept = excluded.any(1), ~excluded
        sets = (kept & has_set[:, None]).nonzero()[:, 1], kept.sum(1) * has_set
        masked = partial(logprobs, kept=filter_of(*(each.cpu().numpy() for each in sets)))
        name = f"{own_names} under sampling masks"
        cases.append((name, masked, lambda x: expected(x.masked_fill(excluded, FLOOR))))
    if linear is not None:
        teacher, name = weight.detach().roll(1, 1), getattr(of, "func", of).__name__
        log_q = _logits(other, teacher, softmax).log_softmax(-1)
        beta, ids = getattr(of, "keywords", {}).get("beta", 0.5), None
        given: dict[str, Tensor] = dict(teacher_hidden=other, teacher_weight=teacher)
        if tokens is not None:
            ids, of_ids = tokens(other, teacher, softmax)
            given, best = dict(ids=ids, log_q=of_ids), log_q.topk(ids.shape[1]).values
            worst = (log_q.gather(1, ids) - best).abs().max() / (1 + best.abs().max())
            if not float(gathered(worst[None], group).max()) <= OUTPUT_ERROR:
                return [
                    f"the {ids.shape[1]} tokens of teacher.top_k are not the teacher's most probable ones"
                ]
        divergence = partial(linear, divergence=of, **given, softmax=softmax)

        def formula(x: Tensor) -> Tensor:
            return _divergence(_coarse(x.log_softmax(-1), ids), _coarse(log_q, ids), name, beta)

        text = name if tokens is None else f"{name} over the tokens of teacher.top_k and all others together"
        cases.append((text, lambda hidden: divergence(hidden, weight), formula))
    return [text for case in cases if (text := problem(*case))]


def _logits(hidden: Tensor, weight: Tensor, softmax: Softmax) -> Tensor:
    """Return the scaled logits of the whole vocabulary, float64 [TOKENS, V], from the dtype of the weight."""
    rows = softmax.own_rows(weight)[1]
    x = torch.full((len(hidden), len(weight)), FLOOR, dtype=torch.float64, device=weight.device)
    x[:, :rows] = torch.cat([part @ weight[:rows].T for part in hidden.split(softmax.chunk)]).double()
    whole = gathered(x, softmax.group).transpose(0, 1).flatten(1)
    return whole[:, : softmax.vocab_size] / softmax.temperature


def _coarse(log_p: Tensor, ids: Tensor | None) -> Tensor:
    """Return the log-probs of the tokens `ids` [TOKENS, k], and of all others together; None: unchanged."""
    if ids is None:
        return log_p
    others = log_p.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat((log_p.gather(1, ids), others), 1)


def _divergence(log_p: Tensor, log_q: Tensor, name: str, beta: float) -> Tensor:
    """Return the divergence of p from q at each token, float64."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if name == "jensen_shannon":
        log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
        return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    return kl(log_q, log_p) if name == "forward_kl" else kl(log_p, log_q)
