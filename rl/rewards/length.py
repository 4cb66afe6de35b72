"""Soft overlong punishment: a penalty that grows as a response approaches the length limit."""

import numpy as np


def overlong_penalties(
    length_tokens: np.ndarray, *, max_tokens: int, buffer_tokens: int, penalty: float
) -> np.ndarray:
    """Return numbers from -penalty to 0 to add to the scores: float64, in the shape of `length_tokens`.

    This is equation 13 of DAPO (arXiv:2503.14476) with L_max = `max_tokens` and L_cache = `buffer_tokens`,
    multiplied by `penalty` (1 in the paper):

        0                                              length <= max - buffer
        penalty * (max - buffer - length) / buffer     max - buffer < length <= max
        -penalty                                       length > max

    For example, with max 4,096, buffer 1,024 and penalty 1 a response of 3,584 tokens gets -0.5.

    Raises ValueError if buffer_tokens is not in 1..max_tokens, or penalty is negative.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"overlong penalty: buffer_tokens={buffer_tokens} must be in 1..max_tokens={max_tokens}. "
            "For no penalty below max_tokens, omit it: longer responses are truncated."
        )
    if not penalty >= 0:
        raise ValueError(f"overlong penalty: penalty={penalty} is subtracted and must not be negative.")
    excess = np.asarray(length_tokens, dtype=np.float64) - (max_tokens - buffer_tokens)
    # 0.0 - x, because -x would yield -0.0 for lengths without a penalty.
    return 0.0 - penalty * np.clip(excess / buffer_tokens, 0.0, 1.0)
