"""KL-Cov (Cui et al., arXiv:2505.22617): a penalty on the tokens of highest covariance. See
`rl.objectives.covariance`.

    loss = -r A,  and + kl_cov_coef |logprobs - old_logprobs| for the selected tokens

Equation 14 has KL(old || policy) as the penalty; the authors' code and verl use this distance, as here. Its
gradient at equal policies is 0, so it acts from the second update of a step on. There is no clip.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rl.config.ranges import NOT_NEGATIVE
from rl.objectives.covariance import covariances, quota
from rl.objectives.log_ratio import TokenLoss, masked_log_ratio, summed

FORMULA = "-ratio A; on the tokens of highest covariance + kl_cov_coef \\|log ratio\\|"
SOURCE = "2505.22617"


@dataclass
class KlCovOptions:
    kl_cov_coef: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of the divergence on the selected tokens. The paper's runs use 1; verl's default is 0.1."""


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    selected_tokens: Tensor,
    *,
    kl_cov_coef: float,
) -> TokenLoss:
    """Return the loss of each token [T] and statistics.

    Statistics (verl's ppo_kl is the mean |log-ratio| in this loss):
        pg_covfrac: tokens selected.
    """
    mask = mask.bool()
    selected = selected_tokens.bool() & mask
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    token_loss = -torch.where(mask, advantages, 0.0) * log_ratio.exp()
    token_loss = token_loss + torch.where(selected, kl_cov_coef * log_ratio.abs(), 0.0)
    return token_loss, summed(ppo_kl=-log_ratio, pg_covfrac=selected)


@torch.no_grad()
def select_tokens(logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cov_fraction: float) -> Tensor:
    """Return the tokens of a mini-batch with the greatest covariance (equation 13), bool [T].

    The number selected is max(1, floor(cov_fraction * unmasked tokens)); among equal covariances the first
    tokens are selected.

    Args:
        logprobs, advantages: floating [T], T tokens of the whole mini-batch.
        mask: bool or 0/1 [T].
        cov_fraction: share of the tokens that are selected.

    Raises:
        ValueError: cov_fraction is not in (0, 1].
    """
    mask = mask.bool()
    number = quota(mask, cov_fraction)
    candidates = torch.nonzero(mask).squeeze(1)
    cov = covariances(logprobs, advantages, mask)[candidates]
    selected = torch.zeros_like(mask)
    selected[candidates[torch.argsort(cov, descending=True, stable=True)[:number]]] = True
    return selected
