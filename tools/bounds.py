"""Bounds of rounding errors, from the dtype and the length of the sums.

One rounding changes a number by a relative error of at most eps / 2. In a sum of n terms most roundings
cancel, in any order of summation: the total error is about sqrt(n) times that of one rounding (Higham and
Mary, "A new approach to probabilistic rounding error analysis", 2019; the worst case is n). SLACK covers the
tail of that distribution. The errors of a wrong formula are hundreds of times larger.
"""

from math import sqrt

import torch

SLACK = 4
PRODUCTS_PER_LAYER = 6
"""Consecutive matrix products of a layer: QKV, scores, weighted sum, output projection, two in the MLP."""


def of_sum(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the bound for a sum of `terms` terms, relative to the sum of their absolute values."""
    return SLACK * sqrt(terms) * torch.finfo(dtype).eps / 2


def of_logits(layers: int, width: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the bound for logits or log-probs of a transformer, relative to the largest one.

    The error is that of consecutive products, each a sum over `width` terms. In bfloat16, products are summed
    in float32 and rounded once, so `width` is 1.
    """
    return of_sum((PRODUCTS_PER_LAYER * layers + 1) * width, dtype)


def of_gradient(layers: int, width: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the bound for a transformer's gradient, relative to its norm.

    The error is that of the consecutive products of the forward and backward pass; `width` as in `of_logits`.
    """
    return of_sum(2 * (PRODUCTS_PER_LAYER * layers + 1) * width, dtype)
