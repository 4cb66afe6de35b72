"""Bounds of the rounding error of a result, from the dtype and the length of the sums.

A rounding changes a number by at most half an eps of its size. Most of the n roundings in a sum cancel, in
whatever order a processor takes them: together they change it by about sqrt(n) of one (Higham and Mary,
"A new approach to probabilistic rounding error analysis", 2019; the worst case is n). SLACK covers the tail
of that distribution. The errors of a wrong formula are hundreds of times larger.
"""

from math import sqrt

import torch
from torch import Tensor

SLACK = 4
PRODUCTS_PER_LAYER = 6
"""Matrix products in series in a layer: QKV, scores, attention's sum and projection, two of the MLP."""


def of_sum(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Relative to the sum of the absolute values of so many terms."""
    return SLACK * sqrt(terms) * torch.finfo(dtype).eps / 2


def of_product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> float:
    """Absolute, for each element of a @ b with a [M, K], b [K, N]: sums of K terms."""
    return of_sum(a.shape[1], dtype) * float((a.detach().double().abs() @ b.detach().double().abs()).max())


def of_logits(layers: int, width: int, dtype: torch.dtype = torch.float32) -> float:
    """Relative to the largest logit or log-prob of a transformer: products in series, of sums over its width.

    In bfloat16 a product is added up in float32 and rounded once: width 1.
    """
    return of_sum((PRODUCTS_PER_LAYER * layers + 1) * width, dtype)


def of_gradient(layers: int, width: int) -> float:
    """Relative to the norm of a transformer's gradient in float32: its products in series, there and back."""
    return of_sum(2 * (PRODUCTS_PER_LAYER * layers + 1) * width)


def of_adam_step(lr: float, eps: float, gradient: float) -> float:
    """Absolute, for each weight after a step of Adam, from the absolute error of the gradient's elements.

    The step is lr * m / (sqrt(v) + eps). m and sqrt(v) change by at most as much as the gradient, and m is at
    most about sqrt(v), so a change d of the gradient changes the step by at most 2 * lr * d / eps. The eps
    must be as large as a gradient: with the default of 1e-8 an element whose gradient is nothing but rounding
    error takes a full step of lr, in a direction that depends on the processor.
    """
    return 2 * lr * gradient / eps


TOY_LOGPROB = 8 * of_logits(layers=2, width=384)
"""Between the engine's and the trainer's log-prob of a token of the toy model (tools/make_toy.py), whose
logits are of size 8. A probability moves by less than its logarithm."""
