"""Bounds of the rounding error of a result, from the dtype and the length of the sums.

A rounding changes a number by at most half an eps of its size. Most of the n roundings in a sum cancel, in
whatever order a processor takes them: together they change it by about sqrt(n) of one (Higham and Mary,
"A new approach to probabilistic rounding error analysis", 2019; the worst case is n). SLACK covers the tail
of that distribution. The errors of a wrong formula are hundreds of times larger.
"""

from math import sqrt

import torch

SLACK = 4
PRODUCTS_PER_LAYER = 6
"""Matrix products in series in a layer: QKV, scores, attention's sum and projection, two of the MLP."""


def of_sum(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Relative to the sum of the absolute values of so many terms."""
    return SLACK * sqrt(terms) * torch.finfo(dtype).eps / 2


def of_logits(layers: int, width: int, dtype: torch.dtype = torch.float32) -> float:
    """Relative to the largest logit or log-prob of a transformer: products in series, of sums over its width.

    In bfloat16 a product is added up in float32 and rounded once: width 1.
    """
    return of_sum((PRODUCTS_PER_LAYER * layers + 1) * width, dtype)


def of_gradient(layers: int, width: int, dtype: torch.dtype = torch.float32) -> float:
    """Relative to the norm of a transformer's gradient: its products in series, there and back.

    In bfloat16 the width is 1, as in `of_logits`.
    """
    return of_sum(2 * (PRODUCTS_PER_LAYER * layers + 1) * width, dtype)
