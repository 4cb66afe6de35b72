"""Sampling by inversion, with one uniform number per token: a hash of the request's seed and the position."""

import numpy as np
import torch

CHUNK = 1 << 18
"""Number of probabilities to sum at once: their float64 sums fit in a core's cache."""


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1), float64 [B], that depend on seed and position only.

    Each is an output of SplitMix64 (Steele, Lea, Flood 2014) from a state that is the hash of the seed plus
    the position times the generator's increment.

    Args:
        seeds: uint64 [B].
        positions: number of tokens before the sampled one, integers [B].
    """
    increment = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seeds + increment) + increment * positions.astype(np.uint64)
    return (_mix(state) >> np.uint64(11)) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    """Return SplitMix64's output function of z, uint64 [B]."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def invert(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return for each row the first token with a cumulative probability above `uniform`, int64 [B].

    For example, the probabilities 0.2, 0.5, 0.3 and the number 0.6 give token 1. A token of probability 0 is
    never returned. The sums are float64, because float32 would distort the frequency of tokens with a
    probability below 6e-8. Raises ValueError if a row contains NaN.

    Args:
        logprobs: float32 [B, V].
        uniform: float64 [B], in [0, 1).
    """
    tokens = []
    rows = max(1, CHUNK // logprobs.shape[1])
    for some, number in zip(logprobs.split(rows), uniform.split(rows)):
        cumulative = some.exp().cumsum(-1, dtype=torch.float64)
        tokens.append(torch.searchsorted(cumulative, number[:, None] * cumulative[:, -1:], right=True)[:, 0])
    found = torch.cat(tokens)
    if (found == logprobs.shape[1]).any():
        raise ValueError(
            "sampler check: the engine's log-probs of a token are NaN; weights of model.path, or of the head "
            "or model that drafts, are not finite."
        )
    return found
