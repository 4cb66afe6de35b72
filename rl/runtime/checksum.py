"""A checksum of weights that costs two passes over them and does not depend on how they are divided."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by the number of bytes of an element."""
FACTOR = 0x9E3779B97F4A7C1
"""Odd number that separates the sums over rows and columns."""
BUCKET = 64 << 20
"""Maximum number of bytes that are copied in order to compute several checksums together."""
ALONE = 1 << 16
"""Minimum size of a tensor in host memory to be compared alone, in bytes."""
WIDENED = 1 << 18
"""Elements that are converted at once, so that a processor's cache holds them."""


@torch.no_grad()
def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, int64 [], modulo 2**64.

    The sum changes if a single element changes. It depends only on the values and the number of elements. If
    the number of elements allows it, the integers are words of 8 bytes, because a CPU adds such words 20
    times as fast. Otherwise each element is one integer.
    """
    own = bits(tensor.contiguous()).view(-1)
    ratio = 8 // own.element_size()
    if own.numel() % ratio:
        return own.sum(dtype=torch.int64)
    return (own if not own.storage_offset() % ratio else own.clone()).view(torch.int64).sum()


@torch.no_grad()
def placed_checksum(values: Tensor, start: Sequence[int] = ()) -> Tensor:
    """Return the checksum of a part of a tensor, int64 [], modulo 2**64.

    The bits of the elements, as integers, are weighted by row and by column in the whole tensor. The checksum
    of the whole tensor is therefore the sum of its parts' checksums, however the tensor is divided. For
    example, two ranks with 64 rows of a weight each add their checksums; the second rank's start is (64, 0).
    The checksum changes if a single element changes, and if two different rows or columns are exchanged.

    start: row and column of the first element in the whole tensor, by default 0. A tensor of more than two
    dimensions has a row per index of all dimensions but the last, and is divided only along the first.
    """
    return placed_checksums([values], [start])[0]


@torch.no_grad()
def placed_checksums(parts: Sequence[Tensor], starts: Sequence[Sequence[int]]) -> Tensor:
    """Return the `placed_checksum` of each of n tensors, int64 [n]. All tensors are on one device.

    Small tensors of equal shapes, such as the experts of a layer, are computed together. If they were
    computed one at a time, tens of thousands of small tensors would take seconds.
    """
    order = list(buckets(parts))
    if not order:
        return torch.zeros(0, dtype=torch.int64)
    at = torch.tensor([_place(part, start) for part, start in zip(parts, starts)], device=parts[0].device)
    found = [_checksums(bits(_stacked(parts, numbers)), at[numbers]) for numbers in order]
    places = torch.tensor([number for numbers in order for number in numbers]).argsort()
    return torch.cat(found)[places.to(found[0].device)]


def _place(part: Tensor, start: Sequence[int]) -> tuple[int, int]:
    """Return row and column of the first element of a part in the whole tensor."""
    *rows, column = start or (0,)
    place = 0
    for first, size in zip(rows, (1, *part.shape[1:-1])):
        place = place * size + first
    return place, column


def buckets(parts: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield every index once; parts of one bucket have one shape and dtype, and at most BUCKET bytes."""
    by_shape = defaultdict[tuple, list[int]](list)
    for number, part in enumerate(parts):
        by_shape[part.shape, part.dtype].append(number)
    for numbers in by_shape.values():
        size = max(1, BUCKET // max(1, parts[numbers[0]].nbytes))
        yield from (numbers[first : first + size] for first in range(0, len(numbers), size))


@torch.no_grad()
def different(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """Return the indices of the pairs of tensors, of one shape and dtype, that differ in a bit.

    On CUDA, tensors of equal shapes are copied together and compared at once; in host memory, only small
    tensors are. Each large tensor in host memory is read once, without a copy.
    """
    alone = {n for n, (first, _) in enumerate(pairs) if not first.is_cuda and first.nbytes >= ALONE}
    wrong = [number for number in alone if not _equal(*pairs[number])]
    rest = [number for number in range(len(pairs)) if number not in alone]
    firsts, seconds = [pairs[number][0] for number in rest], [pairs[number][1] for number in rest]
    numbers, found = [], []
    for some in buckets(firsts):
        differ = bits(_stacked(firsts, some)) != bits(_stacked(seconds, some))
        found.append(differ.reshape(len(some), -1).any(1))
        numbers += [rest[number] for number in some]
    bad = torch.cat(found).tolist() if found else []
    return sorted(wrong + [number for number, is_bad in zip(numbers, bad) if is_bad])


def _stacked(parts: Sequence[Tensor], numbers: list[int]) -> Tensor:
    """Return some of the tensors, [n, ...]; a single one is not copied."""
    return (
        parts[numbers[0]][None] if len(numbers) == 1 else torch.stack([parts[number] for number in numbers])
    )


def bits(values: Tensor) -> Tensor:
    """Return the elements' memory as integers of their size."""
    return values.detach().view(INTEGERS[values.element_size()])


def _equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors in host memory have the same bits; by words of 8 bytes if they allow it."""
    pair = [bits(first), bits(second)]
    ratio = 8 // pair[0].element_size()
    if all(x.is_contiguous() and not x.numel() % ratio and not x.storage_offset() % ratio for x in pair):
        pair = [x.view(-1).view(torch.int64) for x in pair]
    return torch.equal(*pair)


def _checksums(own: Tensor, starts: Tensor) -> Tensor:
    """Return the checksum of each of n integer tensors of one shape, int64 [n].

    own: [n, ...]. starts: row and column of the first element of each, int64 [n, 2].
    """
    tables = own.reshape(len(own), -1, own.shape[-1]) if own.ndim > 1 else own.reshape(-1, 1, 1)
    totals = torch.zeros(len(own), dtype=torch.int64, device=own.device)
    for sums, first, factor in zip(_line_sums(tables), (starts[:, :1], starts[:, 1:]), (FACTOR, 1)):
        places = torch.arange(1, 1 + sums.shape[1], device=own.device) + first
        totals += (sums * places).sum(1) * factor
    return totals


def _line_sums(tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of rows and of columns of n integer tables [n, R, C], int64 [n, R] and [n, C].

    On a CPU, a sum that converts its terms to int64 costs 4 times as much as converting some rows first and
    then adding them.
    """
    if tables.is_cuda:
        return tables.sum(2, dtype=torch.int64), tables.sum(1, dtype=torch.int64)
    number, num_rows, width = tables.shape
    rows = torch.zeros(number, num_rows, dtype=torch.int64)
    columns = torch.zeros(number, width, dtype=torch.int64)
    step = max(1, WIDENED // max(1, number * width))
    for first in range(0, num_rows, step):
        wide = tables[:, first : first + step].long()
        rows[:, first : first + step] = wide.sum(2)
        columns += wide.sum(1)
    return rows, columns
