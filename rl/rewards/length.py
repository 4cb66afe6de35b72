"""Soft overlong punishment: what a response loses as it comes near the longest length, so that being cut is no surprise."""

import numpy as np


def overlong_penalty(length_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """What to add to the score of a response of `length_tokens` tokens, between -penalty and 0.

    DAPO (arXiv:2503.14476, equation 13) with L_max = `max_tokens` and L_cache = `buffer_tokens`, times `penalty` (1 there):

        0                                              length <= max - buffer
        penalty * (max - buffer - length) / buffer     max - buffer < length <= max
        -penalty                                       length > max

    Raises:
        ValueError: buffer_tokens is not in 1..max_tokens, or penalty is negative.
    """
    return float(
        overlong_penalties(length_tokens, max_tokens=max_tokens, buffer_tokens=buffer_tokens, penalty=penalty)
    )


def overlong_penalties(
    length_tokens: np.ndarray, *, max_tokens: int, buffer_tokens: int, penalty: float
) -> np.ndarray:
    """`overlong_penalty` of each length: integers of any shape to float64 of the same shape. Raises the same."""
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"overlong penalty: buffer_tokens is {buffer_tokens}, it must be in 1..max_tokens, which is {max_tokens}. "
            "For no penalty below the longest length, leave it out: responses that long are cut."
        )
    if not penalty >= 0:
        raise ValueError(
            f"overlong penalty: penalty is {penalty}, it is subtracted and must not be negative."
        )
    excess = np.asarray(length_tokens, dtype=np.float64) - (max_tokens - buffer_tokens)
    # 0.0 - x, because -x would make -0.0 of those within the length.
    return 0.0 - penalty * np.clip(excess / buffer_tokens, 0.0, 1.0)
