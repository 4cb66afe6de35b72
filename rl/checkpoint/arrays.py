"""Arrays in the state of a run.

Rank 0's file holds them as shards, because JSON would hold them as text.
For example, the array at `state["carry_over"]["token_ids"]` is the tensor `state/carry_over/token_ids`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rl.checkpoint.shards import Shard, ShardReader

PREFIX = "state/"


def array_shards(state: Mapping[str, Any], prefix: str = PREFIX) -> Iterator[Shard]:
    """Yield each array in the state as a shard. Arrays have one dimension, and keys contain no slash."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from array_shards(value, f"{prefix}{key}/")
        elif isinstance(value, np.ndarray):
            yield Shard(f"{prefix}{key}", ((0, len(value)),), torch.from_numpy(value))


def without_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state without its arrays: plain data for JSON."""
    return {
        key: without_arrays(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if not isinstance(value, np.ndarray)
    }


def restore_arrays(state: dict[str, Any], reader: ShardReader) -> None:
    """Put the arrays of a checkpoint into its state."""
    for name in reader.index_of:
        if name.startswith(PREFIX):
            *parents, key = name.removeprefix(PREFIX).split("/")
            part = state
            for parent in parents:
                part = part[parent]
            part[key] = reader.whole(name).numpy()
