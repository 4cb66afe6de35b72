"""Columns of a batch whose values are too large to be held by every rank.

For example, the routes of 4,000 tokens through 48 layers with 8 chosen experts take 1.5 MB. In such a column,
the row of a sample is held by the rank that generated the sample. All ranks know the holder and the size of
each row. A row travels only to the ranks that train on its sample (`rl.training.held_transfer`).
"""

import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

OF_SEQUENCE = ("routes",)
"""Columns with a value for every token of prompt and response except the last one. Other columns, unless they
hold images, have values for the tokens of the response only."""

SAMPLING_MASKS = ("kept_ids", "kept_counts")
"""Columns that say, for each token, from which set of tokens (top-k, top-p) the engine sampled it."""

PIXELS = "pixels"
"""Column with the pixels of a sample's images, end to end. An image has height * width * 3 bytes."""

PLACES = "image_places"
"""Column with the places of a sample's images, in a run with environments
(`rl.data.images.placed_pixels`)."""

OF_CONTEXT = (*OF_SEQUENCE, PIXELS, PLACES)
"""Columns that cover the context, too. In each turn they repeat the values of the earlier turns."""


class HeldRow(NamedTuple):
    """The values of one sample."""

    key: int
    """`row_key` of the sample's tokens, computed on the rank that generated the sample."""
    values: np.ndarray
    """Array [number of values, *shape of one value]."""


KEY = np.dtype(np.int64)
"""Type in which `HeldRow.key` is sent."""


@dataclass
class ColumnBytes:
    """Bytes of held columns that this rank received from other ranks, and the bytes that the plans
    expected."""

    received: int = 0
    planned: int = 0

    def __add__(self, other: "ColumnBytes") -> "ColumnBytes":
        return ColumnBytes(self.received + other.received, self.planned + other.planned)

    def checked(self, what: str) -> "ColumnBytes":
        """Return self. Raises RuntimeError if this rank received more or fewer bytes than planned.

        what: the transfer, for the error.
        """
        if self.received != self.planned:
            raise RuntimeError(
                f"held columns: {what} brought {self.received} bytes to this rank, whose plan has "
                f"{self.planned}"
            )
        return self


def row_key(prompt_ids: np.ndarray, response_ids: np.ndarray) -> int:
    """Return a 32-bit hash of a sample's tokens. It is sent with the row, so that a wrong row is detected."""
    return zlib.crc32(response_ids.tobytes(), zlib.crc32(prompt_ids.tobytes()))


@dataclass(frozen=True)
class Absent:
    """Stands for an array of values that only another rank has: its type and shape."""

    dtype: np.dtype
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass
class HeldColumn:
    """One column of N samples."""

    rows: dict[int, HeldRow]
    """Rows of the samples that this rank generated, by the index of the sample in the batch."""
    holders: Tensor
    """int64 [N]: the rank that holds the row of each sample."""
    lengths: Tensor
    """int64 [N]: number of values of each sample."""
    dtype: np.dtype
    shape: tuple[int, ...] = ()
    """Shape of one value."""
    local: dict[int, np.ndarray] = field(default_factory=dict)
    """Values of the samples that this rank trains on, or the part of the values that it needs, by index of
    the sample (`rl.training.held_transfer`)."""
    moved: dict[int, int] = field(default_factory=dict)
    """For each row that was sent so far: index of its sample -> data parallel rank that received it.
    Identical on all ranks."""

    @property
    def num_bytes(self) -> Tensor:
        """Size of each sample's values, int64 [N]."""
        return self.lengths * self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def select(self, samples: list[int]) -> "HeldColumn":
        """Return the column of these samples, in this order. In the result, no row has been sent yet."""
        index = torch.tensor(samples, dtype=torch.int64)
        rows = {place: self.rows[i] for place, i in enumerate(samples) if i in self.rows}
        return HeldColumn(rows, self.holders[index], self.lengths[index], self.dtype, self.shape)

    def of(self, samples: list[int]) -> np.ndarray:
        """Return the values of samples that this rank trains on, end to end."""
        empty = np.zeros((0, *self.shape), self.dtype)
        return np.concatenate([self.local[i] for i in samples]) if samples else empty


def concatenate_columns(columns: list[HeldColumn]) -> HeldColumn:
    """Return one column with the samples of all columns, in order."""
    sizes = np.cumsum([0, *(len(column.holders) for column in columns)]).tolist()
    return HeldColumn(
        {first + i: row for first, column in zip(sizes, columns) for i, row in column.rows.items()},
        torch.cat([column.holders for column in columns]),
        torch.cat([column.lengths for column in columns]),
        columns[0].dtype,
        columns[0].shape,
    )
