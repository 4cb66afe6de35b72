"""Clip-Cov (Cui et al., arXiv:2505.22617): some tokens of high covariance get no gradient. See
`rl.objectives.covariance`.

The loss is PPO's without the dual clip, as in the paper and in verl. It is 0 for the selected tokens; they
still count in every denominator (equation 12). The authors' runs set clip_low and clip_high to 1.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rl.config.ranges import FINITE, PROBABILITY
from rl.objectives.covariance import covariances, quota
from rl.objectives.log_ratio import TokenLoss, masked_log_ratio
from rl.objectives.losses.ppo import ppo

ASCENDING = (("cov_low", "cov_high"),)
RECIPE = {"clip_low": 1.0, "clip_high": 1.0}
FORMULA = "PPO's without dual clip; tokens drawn among those of high covariance get no gradient"
SOURCE = "2505.22617"


@dataclass
class ClipCovOptions:
    cov_fraction: Annotated[float, PROBABILITY] = 0.0002
    """Share of the mini-batch's tokens that are selected. The paper's runs use 2e-4 for clip-cov; for kl-cov
    2e-3 with a model of 7B parameters and 2e-4 with one of 32B."""
    cov_low: Annotated[float, FINITE] = 1.0
    """Minimum covariance of a selected token."""
    cov_high: Annotated[float, FINITE] = 5.0
    """Maximum covariance of a selected token."""


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    selected_tokens: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Return the loss of each token [T] and statistics: the statistics of `ppo`, and pg_covfrac: tokens
    selected (verl logs these as pg_clipfrac).
    """
    selected = selected_tokens.bool() & mask.bool()
    clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=0.0)
    token_loss, stats = ppo(logprobs, old_logprobs, advantages, mask, **clip)
    token_loss = torch.where(selected, 0.0, token_loss)
    return token_loss, stats | {"pg_covfrac": selected.to(token_loss.dtype).sum()}


@torch.no_grad()
def select_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    cov_fraction: float,
    cov_low: float,
    cov_high: float,
    seed: int,
) -> Tensor:
    """Return the tokens of a mini-batch that `clip_cov` leaves out, drawn at random (equation 11), bool [T].

    Candidates are the unmasked tokens with cov_low <= cov <= cov_high that PPO's clip does not cut already.
    The number selected is max(1, floor(cov_fraction * unmasked tokens)), or all candidates if they are fewer.
    For example, cov_fraction=0.0002 selects 20 of 100,000 tokens.

    Args:
        logprobs, old_logprobs, advantages: floating [T], T tokens of the whole mini-batch.
        mask: bool or 0/1 [T].
        clip_low, clip_high: of the loss.
        cov_fraction: share of the tokens that are selected.
        cov_low, cov_high: bounds of the covariance. The paper: 1 and 5, with advantages of variance 1.
        seed: seed of the draw; vary it from update to update.

    Raises:
        ValueError: cov_fraction is not in (0, 1].
    """
    mask = mask.bool()
    number = quota(mask, cov_fraction)
    cov = covariances(logprobs, advantages, mask)
    ratio = masked_log_ratio(logprobs, old_logprobs, mask).exp()
    cut = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    candidates = torch.nonzero(mask & ~cut & (cov >= cov_low) & (cov <= cov_high)).squeeze(1)
    # One draw per position, on the CPU: the selection does not depend on the device, and does not change for
    # other tokens when one token is no longer a candidate.
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(len(mask), dtype=torch.float64, generator=generator).to(mask.device)
    selected = torch.zeros_like(mask)
    selected[candidates[torch.argsort(draws[candidates], stable=True)[:number]]] = True
    return selected
