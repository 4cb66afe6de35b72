"""Distillation: divergences of the policy's distribution p from the teacher's q, at each token.

A divergence is a function (log_p, log_q) -> (terms, slopes). The log-probs are [T, V], or [T, V/tp] for a
part of the vocabulary. The sum of `terms` over the vocabulary is the divergence D. `slopes` are p_i dD/dp_i.
A multiple c p_i, with the same c for all i, may be added to them. The gradient for the logits z of p is then

    dD/dz_i = slopes_i - p_i sum_j slopes_j

A part of the vocabulary therefore needs only two sums per token from the other parts. Log-probs must be
finite. Give a probability of 0 as the same large negative log-prob in p and q, for example -1e20.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(log_p, log_q) -> (terms, slopes), all of one shape."""


def forward_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return terms and slopes of KL(q || p) = sum_i q_i (log q_i - log p_i); dD/dz = p - q.

    The policy covers all tokens that the teacher finds likely (Hinton et al., arXiv:1503.02531).
    """
    q = log_q.exp()
    return q * (log_q - log_p), -q


def reverse_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return terms and slopes of KL(p || q) = sum_i p_i (log p_i - log q_i); dD/dz = p (log p - log q - D).

    The policy keeps to the tokens that the teacher finds likely (MiniLLM, arXiv:2306.08543).
    """
    terms = log_p.exp() * (log_p - log_q)
    return terms, terms


def jensen_shannon(log_p: Tensor, log_q: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """Return terms and slopes of beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p.

    dD/dz = (1 - beta) p (log p/m - KL(p || m)). It is defined in section 2 of GKD (arXiv:2306.13649). For
    beta -> 0, its quotient by beta approaches forward_kl. For beta -> 1, its quotient by 1 - beta approaches
    reverse_kl.
    """
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    mine = (1 - beta) * log_p.exp() * (log_p - log_m)
    return mine + beta * log_q.exp() * (log_q - log_m), mine


def divergence_of(name: str, beta: float) -> Divergence:
    """Return the divergence of this name. Only jensen_shannon reads `beta`."""
    found: dict[str, Divergence] = {
        "forward_kl": forward_kl,
        "reverse_kl": reverse_kl,
        "jensen_shannon": partial(jensen_shannon, beta=beta),
    }
    return found[name]


def log_ratio_advantages(teacher_logprobs: Tensor, old_logprobs: Tensor, *, coef: float) -> Tensor:
    """Return coef * log(q(y_t) / p(y_t)) for each token, [T]: the term that a teacher adds to the advantages.

    If the tokens were sampled from p, its mean is -coef * KL(p || q) for the distribution at the token.
    Therefore REINFORCE with this advantage lowers the reverse KL divergence of single tokens.

    teacher_logprobs, old_logprobs: log-probs of the tokens by the teacher, and by the policy before the
        updates of the step, [T].
    """
    return coef * (teacher_logprobs - old_logprobs)
