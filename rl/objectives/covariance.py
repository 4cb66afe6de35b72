"""Covariance of log-probability and advantage, by which Clip-Cov and KL-Cov select tokens (arXiv:2505.22617).

To first order, a policy-gradient step lowers the entropy by this covariance, and a handful of tokens carries
nearly all of it (table 1 of the paper). For one token, with means over all tokens, it is (equation 10):

    cov = (logprobs - mean logprobs) (advantages - mean advantages)

The selection reads the whole mini-batch, over all micro-batches and ranks. Given the same arguments, it
selects the same tokens on every rank. Its result is then cut into micro-batches like `advantages`. verl
selects within each micro-batch, so its result depends on the size of the micro-batches. For example, 2e-4 of
1,000,000 tokens are 200 tokens here. Within 250 micro-batches of 4,000 tokens, it would be one token each.
"""

import torch
from torch import Tensor


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the covariance of each token, [T] float64, 0 at masked positions."""
    count = mask.sum().clamp(min=1)
    centered = []
    for x in (logprobs, advantages):
        x = torch.where(mask, x, 0.0).double()
        centered.append(torch.where(mask, x - x.sum() / count, 0.0))
    return centered[0] * centered[1]


def quota(mask: Tensor, fraction: float) -> int:
    """Return the number of tokens to select. Raises ValueError if the fraction is not in (0, 1]."""
    if not 0 < fraction <= 1:
        raise ValueError(f"cov_fraction={fraction} must be greater than 0 and at most 1, such as 2e-4.")
    return max(1, int(fraction * int(mask.sum())))
