"""The boxes of Hugging Face tensors in a flat range of a parameter.

The distributed optimizer may split a rank's flattened parameter at any element. Such a range of elements
consists of a few boxes of the parameter: for example, elements 3 to 9 of a [4, 4] parameter are the end of
row 0, the whole row 1 and the start of row 2. By `rl.models.layout`, each box of the parameter consists of
boxes of Hugging Face tensors. A whole parameter is the range of all its elements. Boxes of Hugging Face
tensors do not depend on the layout of the run that saves. A run with another layout reads other boxes of the
same tensors. Plain data, no torch.distributed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl.models.boxes import Box, extent, index, moved, overlap, relative, volume, whole
from rl.models.layout import Piece


@dataclass(frozen=True)
class FlatRegion:
    """A box of the Hugging Face tensor `hf`, and its place in a flat range of elements."""

    hf: str
    box: Box
    start: int
    """Index in the range at which a row-major block of the shape `block` begins."""
    block: tuple[int, ...]
    inner: Box
    """The box within the block."""

    def view(self, flat: Tensor) -> Tensor:
        """Return the elements, with the shape of the box, as a view of the range [n]."""
        own = flat[self.start : self.start + math.prod(self.block)].view(self.block)[index(self.inner)]
        return own[(0,) * (own.dim() - len(self.box))]  # a parameter of all experts has one dimension more


def regions(pieces: Sequence[Piece], shape: tuple[int, ...], start: int, stop: int) -> Iterator[FlatRegion]:
    """Yield the regions of elements start .. stop - 1 of a flattened parameter of that shape and layout."""
    done = 0
    for block in blocks(start, stop, shape):
        for piece in pieces:
            local = overlap(piece.local_box, block)
            if local is not None:
                dims = len(piece.hf_box)
                box = moved(local[-dims:], piece.local_box[-dims:], piece.hf_box)
                yield FlatRegion(piece.hf, box, done, extent(block), relative(local, block))
        done += volume(block)


def blocks(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """Return the boxes that make up elements start .. stop - 1 of a row-major tensor, in order."""
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
    rows: list[Box] = [((first, last), *whole(shape[1:]))] if first < last else []
    return head + rows + within(last, 0, stop - last * row)
