"""A checksum of weights that costs two passes over them and does not depend on how they are divided."""

from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by the number of bytes of an element."""
FACTOR = 0x9E3779B97F4A7C1
"""Odd number that separates the sums over rows and columns."""


@torch.no_grad()
def placed_checksum(values: Tensor, start: Sequence[int] = ()) -> Tensor:
    """Return the checksum of a part of a tensor, int64 [], modulo 2**64.

    The bits of the elements, as integers, are weighted by row and by column in the whole tensor. The checksum
    of the whole tensor is therefore the sum of those of its parts, however it is divided. It changes if a
    single element changes, and if two different rows or columns are exchanged.

    start: row and column of the first element in the whole tensor, by default 0. A tensor of more than two
    dimensions has a row per index of all dimensions but the last.
    """
    bits = values.detach().view(INTEGERS[values.element_size()])
    table = bits.reshape(-1, bits.shape[-1]) if bits.ndim else bits.reshape(1, 1)
    row, column = (0, 0, *start)[-2:]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for dim, first, factor in ((1, row, FACTOR), (0, column, 1)):
        sums = table.sum(dim, dtype=torch.int64)
        places = torch.arange(first + 1, first + 1 + len(sums), device=values.device)
        total += (sums * places).sum() * factor
    return total
