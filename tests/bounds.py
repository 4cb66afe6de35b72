"""Bounds of rounding errors for tests: the bounds of tools/bounds.py and further ones."""

import torch
from torch import Tensor

from tools.bounds import PRODUCTS_PER_LAYER, SLACK, of_gradient, of_logits, of_sum

__all__ = ["PRODUCTS_PER_LAYER", "SLACK", "of_adam_step", "of_gradient", "of_logits", "of_product", "of_sum"]


def of_product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> float:
    """Absolute, for each element of a @ b with a [M, K], b [K, N]: sums of K terms."""
    return of_sum(a.shape[1], dtype) * float((a.detach().double().abs() @ b.detach().double().abs()).max())


def of_adam_step(lr: float, eps: float, gradient: float) -> float:
    """Absolute, for each weight after a step of Adam, from the absolute error of the gradient's elements.

    The step is lr * m / (sqrt(v) + eps). m and sqrt(v) change by at most as much as the gradient, and m is at
    most about sqrt(v), so a change d of the gradient changes the step by at most 2 * lr * d / eps. The eps
    must be as large as a gradient. For example, with the default of 1e-8 an element takes a full step of lr
    although its gradient is only rounding error, and the processor decides the direction.
    """
    return 2 * lr * gradient / eps


TOY_LOGPROB = 8 * of_logits(layers=2, width=384)
"""Between the engine's and the trainer's log-prob of a token of the toy model (tools/make_toy.py). The toy
model's logits are of size 8. A probability moves by less than its logarithm."""
