"""Distillation: divergences of the policy's distribution p from the teacher's q, at each token.

A divergence is a function (log_p, log_q) -> (terms, slopes) of log-probs [T, V], or of a part [T, V/tp] of
the vocabulary. The sum of `terms` over the vocabulary is the divergence D. `slopes` are p_i dD/dp_i, up to a
multiple of p_i that is equal for all i. The gradient for the logits z of p is then

    dD/dz_i = slopes_i - p_i sum_j slopes_j

A part of the vocabulary therefore needs only two sums per token from the other parts. Log-probs must be
finite: a probability of 0 is given as a large negative number, the same in p and q, for example -1e20.
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

    The policy keeps to tokens that the teacher finds likely (MiniLLM, arXiv:2306.08543).
    """
    terms = log_p.exp() * (log_p - log_q)
    return terms, terms


def jensen_shannon(log_p: Tensor, log_q: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """Return terms and slopes of beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p.

    dD/dz = (1 - beta) p (log p/m - KL(p || m)). GKD (arXiv:2306.13649), section 2. Divided by beta or by
    1 - beta it approaches forward_kl for beta -> 0, and reverse_kl for beta -> 1.
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
    """Return coef * log(q(y_t) / p(y_t)) of each token, [T]: the teacher's part of the advantages.

    With samples of p its mean is -coef * KL(p || q) of the token's distribution, so that REINFORCE with it
    follows the gradient of the reverse KL divergence of single tokens.

    teacher_logprobs, old_logprobs: log-probs of the tokens by the teacher and by the policy before the step's
        updates, [T].
    """
    return coef * (teacher_logprobs - old_logprobs)
