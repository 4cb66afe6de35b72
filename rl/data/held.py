"""Columns of a batch with values too large for every rank.

For example, the routes of 4,000 tokens through 48 layers with 8 chosen experts take 1.5 MB. The rank that
generated a sample holds its row. All ranks know who holds which row, and its size. A row travels only to the
ranks that train on the sample (`rl.training.held_transfer`).
"""

import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

OF_SEQUENCE = ("routes",)
"""Columns with a value for every token of the sequence except the last one, the context included. Other
columns belong to the tokens of the response."""

SAMPLING_MASKS = ("kept_ids", "kept_counts")
"""Columns of the set of tokens that the engine sampled each token from."""

PIXELS = "pixels"
"""Column of the pixels of a sample's images end to end, height * width * 3 bytes each."""

PLACES = "image_places"
"""Column of a sample's images in a run with environments (`rl.data.images.placed_pixels`)."""

OF_CONTEXT = (*OF_SEQUENCE, PIXELS, PLACES)
"""Columns that repeat the values of earlier turns in each turn."""


class HeldRow(NamedTuple):
    """The values of one sample."""

    key: int
    """`row_key` of the sample's tokens, computed where it was generated."""
    values: np.ndarray
    """[number of values, *shape of a value]."""


KEY = np.dtype(np.int64)
"""Type of `HeldRow.key` on the way."""


@dataclass
class ColumnBytes:
    """Bytes of held columns that this rank received from others, and that the plans gave it."""

    received: int = 0
    planned: int = 0

    def __add__(self, other: "ColumnBytes") -> "ColumnBytes":
        return ColumnBytes(self.received + other.received, self.planned + other.planned)

    def checked(self, what: str) -> "ColumnBytes":
        """Return this. Raises RuntimeError if `what` brought this rank other bytes than planned."""
        if self.received != self.planned:
            raise RuntimeError(
                f"held columns: {what} brought {self.received} bytes to this rank, whose plan has "
                f"{self.planned}"
            )
        return self


def row_key(prompt_ids: np.ndarray, response_ids: np.ndarray) -> int:
    """Return a 32-bit hash of a sample's tokens. It travels with the row, so that a wrong row is an error."""
    return zlib.crc32(response_ids.tobytes(), zlib.crc32(prompt_ids.tobytes()))


@dataclass(frozen=True)
class Absent:
    """Stands for an array of values that another rank has."""

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
    """Rows of the samples that this rank generated, by index of the sample in the batch."""
    holders: Tensor
    """int64 [N]: rank that holds each sample's row."""
    lengths: Tensor
    """int64 [N]: number of values of each sample."""
    dtype: np.dtype
    shape: tuple[int, ...] = ()
    """Shape of one value."""
    local: dict[int, np.ndarray] = field(default_factory=dict)
    """Values, or the needed part, of the samples that this rank trains on (`rl.training.held_transfer`)."""
    moved: dict[int, int] = field(default_factory=dict)
    """Data parallel rank that has received each row so far, by sample; identical on all ranks."""

    @property
    def num_bytes(self) -> Tensor:
        """Size of each sample's values, int64 [N]."""
        return self.lengths * self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def select(self, samples: list[int]) -> "HeldColumn":
        """Return the column of these samples, in this order, before any row has moved."""
        index = torch.tensor(samples, dtype=torch.int64)
        rows = {place: self.rows[i] for place, i in enumerate(samples) if i in self.rows}
        return HeldColumn(rows, self.holders[index], self.lengths[index], self.dtype, self.shape)

    def of(self, samples: list[int]) -> np.ndarray:
        """Return the values of samples that this rank trains on, end to end."""
        empty = np.zeros((0, *self.shape), self.dtype)
        return np.concatenate([self.local[i] for i in samples]) if samples else empty


def concatenate_columns(columns: list[HeldColumn]) -> HeldColumn:
    """Return the column of all samples, in order."""
    sizes = np.cumsum([0, *(len(column.holders) for column in columns)]).tolist()
    return HeldColumn(
        {first + i: row for first, column in zip(sizes, columns) for i, row in column.rows.items()},
        torch.cat([column.holders for column in columns]),
        torch.cat([column.lengths for column in columns]),
        columns[0].dtype,
        columns[0].shape,
    )
