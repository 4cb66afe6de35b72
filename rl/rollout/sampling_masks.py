"""Sampling masks of a completion: the tokens among which each of its tokens was sampled, as two held columns.

`kept_ids` has the ids of all masks end to end, sorted within a mask, and `kept_counts` the size of each mask.
Both have the smallest unsigned type that holds the size of the vocabulary. A bit set would be smaller only if
a mask had more than 1/32 of a large vocabulary.
"""

from collections.abc import Sequence

import numpy as np


def columns_of(masks: Sequence[Sequence[int] | np.ndarray], vocab_size: int) -> dict[str, np.ndarray]:
    """Return the held columns of a completion's tokens, from the ids in each token's mask."""
    dtype = np.min_scalar_type(vocab_size)
    parts = [np.asarray(ids, dtype) for ids in masks]
    return {
        "kept_ids": np.concatenate(parts) if parts else np.zeros(0, dtype),
        "kept_counts": np.array([len(part) for part in parts], dtype),
    }
