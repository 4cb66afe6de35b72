"""Declarations of a batch's columns: what is one value per token, what losses read, what is stored.

A field of `rl.data.batch.Batch` declares its column with `per_token` or `per_sample`. Packing, losses, checks
and stored rollouts derive their lists from these declarations (`rl.data.batch.COLUMNS`).
"""

from dataclasses import MISSING, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Column:
    """Owner, type and use of a column."""

    is_per_token: bool
    """One value per response token, [T]; else one per sample, [N]."""
    dtype: torch.dtype = torch.float32
    in_loss: bool = False
    """Whether losses may read it; then micro-batches contain it."""
    stored: str = ""
    """Type in stored rollouts; empty: not stored."""
    stored_as: str = ""
    """Name in stored rollouts; empty: that of the column."""
    learned: bool = False
    """Whether `learn` fills it, and not `collect`."""


def per_token(dtype: torch.dtype = torch.float32, **facts: Any) -> Any:
    """Return the field of a token column, which is None until a phase fills it. facts: of `Column`."""
    return field(default=None, metadata={"column": Column(True, dtype, **facts)})


def per_sample(dtype: torch.dtype = torch.float32, *, required: bool = False, **facts: Any) -> Any:
    """Return the field of a sample column. required: it is never None. facts: of `Column`."""
    return field(default=MISSING if required else None, metadata={"column": Column(False, dtype, **facts)})
