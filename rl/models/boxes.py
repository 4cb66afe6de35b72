"""Boxes: axis-aligned rectangular parts of a tensor. Plain data."""

import math

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension."""


def index(box: Box) -> tuple[slice, ...]:
    """Return the box as an index of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of all elements of a tensor of that shape."""
    return tuple((0, size) for size in shape)


def extent(box: Box) -> tuple[int, ...]:
    """Return the shape of the box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Return the number of elements in the box."""
    return math.prod(extent(box))


def overlap(a: Box, b: Box) -> Box | None:
    """Return the elements in both boxes of one tensor, or None if there are none."""
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def moved(box: Box, source: Box, target: Box) -> Box:
    """Return the box shifted as `source` is shifted onto `target`."""
    return tuple(
        (start - old + new, stop - old + new)
        for (start, stop), (old, _), (new, _) in zip(box, source, target, strict=True)
    )


def relative(box: Box, outer: Box) -> Box:
    """Return the box in coordinates that begin at the first element of `outer`."""
    return moved(box, outer, whole(extent(outer)))
