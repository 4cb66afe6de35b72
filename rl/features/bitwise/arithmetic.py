"""Sums, products and functions with results independent of order, blocking, ranks and processor.

A sum of floating-point numbers depends on the order of its terms, because each addition rounds: for example,
in float64 (1e16 + 1) - 1e16 is 0, but (1e16 - 1e16) + 1 is 1. Here the terms are first rounded to multiples
of a power of two, with so few bits that float64 holds every product and every partial sum exactly. Any order
of the additions, and any BLAS, then gives the same result, so float64 matrix products can be used as they
are. The sums of several ranks may be added in any order too.

The remaining operations are elementwise +, -, *, / and sqrt, which IEEE 754 rounds in one way. `exp` and
`log` are composed of them, because vectorised and scalar versions of a library's functions differ in the last
bit.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

MAX_TERMS = 1 << 20
"""Maximum number of terms of a sum over keys, the vocabulary or the hidden channels."""
TOTAL_BITS = 32
"""Terms of `total` are rounded to multiples of 2**-32; their sum fits 52 bits."""


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent, float64. exponent: integers from -1022 to 1023."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def scale_above(x: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the power of two above |x| along a dimension, float64; the dimension is kept with size 1.

    group: ranks that hold the other elements of the dimension; collective over it (one max).
    """
    largest = x.abs().amax(dim, keepdim=True).double()
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return power_of_two(torch.frexp(largest)[1])


def bits_for(terms: int) -> int:
    """Return the bits per factor that let float64 hold a sum of `terms` products exactly.

    For example, 21 bits for 1,024 terms: a product has 42 bits, and the sum 10 more.
    """
    return (53 - (terms - 1).bit_length()) // 2


def slices(x: Tensor, bits: int, count: int) -> list[Tensor]:
    """Return integers such that sum_i slices[i] * 2**(-bits * (i + 1)) is x, rounded to count * bits bits.

    x: float64, at most 1 in absolute value. Integers are float64, at most 2**bits.
    """
    found = []
    for _ in range(count):
        x = x * float(1 << bits)
        found.append(torch.round(x))
        x = x - found[-1]
    return found


def product(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    """Return the parts of a @ b as exact integers: [high @ high, high @ low + low @ high].

    The parts of several ranks may be added before `combine`. a, b: from `slices`, with the same bits.
    """
    parts = [a[0] @ b[0]]
    if len(a) > 1:
        parts.append(torch.matmul(a[0], b[1]).add_(a[1] @ b[0]))
    return parts


def combine(parts: list[Tensor], bits: int) -> Tensor:
    """Return the product's value, float64, of parts that are summed over all ranks."""
    value = parts[0] if len(parts) == 1 else parts[0] + parts[1] * 2.0**-bits
    return value * 4.0**-bits


def sum_over(parts: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the parts summed over the ranks of the group. Collective over it."""
    if group is None or group.size() == 1:
        return parts
    stacked = torch.stack(parts)
    dist.all_reduce(stacked, group=group)
    return list(stacked)


def total(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum over the last dimension, kept with size 1, and over the ranks of the group.

    x: float64, at most 1 in absolute value, at most MAX_TERMS terms.
    """
    found = torch.round(x * 2.0**TOTAL_BITS).sum(-1, keepdim=True)
    return sum_over([found], group)[0] * 2.0**-TOTAL_BITS


_EXP = [1.0 / math.factorial(k) for k in range(12)]
_LN2 = math.log(2)


def exp(x: Tensor) -> Tensor:
    """Return e**x, float64, with a relative error of 1e-13; x is clamped to +-700."""
    x = x.clamp(-700.0, 700.0)
    turns = torch.round(x * (1.0 / _LN2))
    rest = x - turns * _LN2
    found = rest * _EXP[-1]
    for coefficient in _EXP[-2:0:-1]:
        found.add_(coefficient).mul_(rest)
    return found.add_(1.0).mul_(power_of_two(turns))


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of a positive float64."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = exponent.double() - small.double()
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square = z * z
    found = torch.full_like(z, 1.0 / 23)
    for k in range(21, 0, -2):
        found = found * square + 1.0 / k
    return exponent * _LN2 + found * z * 2.0
