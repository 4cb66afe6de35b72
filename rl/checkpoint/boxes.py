"""Which boxes of Hugging Face tensors a flat piece of a parameter holds, and where.

The distributed optimizer cuts a rank's parameter, flattened, at any element. Such a run of elements is a few boxes of the
parameter (in two dimensions: the end of a row, whole rows, the start of a row), and each of them is boxes of Hugging Face
tensors by `rl.models.layout`. A weight is the run of all elements. In this form nothing depends on the layout of the run that
saves: another layout asks for other boxes of the same tensors. Plain data, no torch.distributed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl.models.layout import Box, Piece, index


@dataclass(frozen=True)
class Region:
    """A box of the Hugging Face tensor `hf` and the same elements of a run."""

    hf: str
    box: Box
    start: int
    """First element in the run of the row-major block `block` ..."""
    block: tuple[int, ...]
    inner: Box
    """... in which this box holds them."""

    def view(self, run: Tensor) -> Tensor:
        """The elements, with the shape of the box, as a view of the run [n]."""
        return run[self.start : self.start + math.prod(self.block)].view(self.block)[index(self.inner)]


def regions(pieces: Sequence[Piece], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Region]:
    """Of the elements start .. stop - 1 of a parameter of that shape, flattened, whose layout is `pieces`."""
    done = 0
    for block in blocks(start, stop, shape):
        for piece in pieces:
            local = overlap(piece.local_box, block)
            if local is not None:
                moved = tuple(
                    (a - p + h, b - p + h)
                    for (a, b), (p, _), (h, _) in zip(local, piece.local_box, piece.hf_box)
                )
                inner = tuple((a - origin, b - origin) for (a, b), (origin, _) in zip(local, block))
                yield Region(piece.hf, moved, done, extent(block), inner)
        done += volume(block)


def blocks(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """The boxes that make up elements start .. stop - 1 of a row-major tensor, in their order."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start, stop),)]
    row = math.prod(shape[1:])

    def within(number: int, first: int, last: int) -> list[Box]:
        return [((number, number + 1), *box) for box in blocks(first, last, shape[1:])]

    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        return within(last, start - last * row, stop - last * row)
    head = within(first - 1, start - (first - 1) * row, row) if start < first * row else []
    whole = [((first, last), *((0, size) for size in shape[1:]))] if first < last else []
    return head + whole + within(last, 0, stop - last * row)


def overlap(a: Box, b: Box) -> Box | None:
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b))
    return both if all(start < stop for start, stop in both) else None


def extent(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return math.prod(extent(box))
