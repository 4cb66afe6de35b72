"""Clip-Cov and KL-Cov: spare the few tokens that make the policy's entropy collapse (Cui et al., arXiv:2505.22617).

To first order a policy-gradient step lowers the entropy by the covariance of log-probability and advantage, and a handful
of tokens carries nearly all of it (table 1 there). Of one token, with means over all the tokens (equation 10):

    cov = (logprobs - mean logprobs) (advantages - mean advantages)

Choosing such tokens needs the whole mini-batch, over all micro-batches and ranks; applying the choice does not. So each
method is two functions: `*_tokens` chooses, over the mini-batch's tokens laid end to end, and gives the same tokens
wherever it is called with the same arguments; its result is then cut like `advantages`, and the loss of a micro-batch
takes it as `chosen`. (verl chooses anew within each micro-batch, so there the result depends on its size.)

Choosing before the first update of a mini-batch needs the policy's log-probabilities of all its tokens. Where a forward
pass for them costs too much, pass the old ones: those of the policy at the start of the step, the same for the first
mini-batch.

Shapes: `T` response tokens, flat. Arguments, masks and statistics are those of `rl.objectives.policy_loss`.
"""

import torch
from torch import Tensor

from rl.objectives.policy_loss import Loss, masked_log_ratio, ppo, summed


def _covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """[T] float64. 0 at masked positions."""
    count = mask.sum().clamp(min=1)
    centered = []
    for x in (logprobs, advantages):
        x = torch.where(mask, x, 0.0).double()
        centered.append(torch.where(mask, x - x.sum() / count, 0.0))
    return centered[0] * centered[1]


def _quota(mask: Tensor, fraction: float) -> int:
    if not 0 < fraction <= 1:
        raise ValueError(
            f"the fraction of tokens to choose is {fraction}; it must be in (0, 1], such as 2e-4"
        )
    return max(1, int(fraction * int(mask.sum())))


@torch.no_grad()
def clip_cov_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    fraction: float,
    cov_low: float,
    cov_high: float,
    seed: int,
) -> Tensor:
    """Tokens of a mini-batch that `clip_cov` is to leave out, chosen at random (equation 11).

    Candidates are the unmasked tokens with cov_low <= cov <= cov_high that PPO's clip does not cut already.

    Args:
        logprobs, old_logprobs, advantages: floating [T], T tokens of the whole mini-batch.
        mask: bool or 0/1 [T].
        clip_low, clip_high: those of the loss.
        fraction: chosen are max(1, floor(fraction T)) tokens, T without the masked ones, or all candidates if they are
            fewer. The paper's runs: 2e-4.
        cov_low, cov_high: bounds of the covariance. The paper: 1 and 5, with advantages of variance 1.
        seed: of the choice. Vary it from update to update.

    Returns:
        bool [T].

    Raises:
        ValueError: fraction is not in (0, 1].
    """
    mask = mask.bool()
    quota = _quota(mask, fraction)
    cov = _covariances(logprobs, advantages, mask)
    ratio = masked_log_ratio(logprobs, old_logprobs, mask).exp()
    cut = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    candidates = torch.nonzero(mask & ~cut & (cov >= cov_low) & (cov <= cov_high)).squeeze(1)
    # One draw per position, on the CPU: the choice does not depend on the device, and a token that stops to be a
    # candidate changes nobody else's luck.
    luck = torch.rand(len(mask), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(
        mask.device
    )
    chosen = torch.zeros_like(mask)
    chosen[candidates[torch.argsort(luck[candidates], stable=True)[:quota]]] = True
    return chosen


@torch.no_grad()
def kl_cov_tokens(logprobs: Tensor, advantages: Tensor, mask: Tensor, *, fraction: float) -> Tensor:
    """Tokens of a mini-batch that `kl_cov` is to hold back, those with the greatest covariance (equation 13).

    Args:
        logprobs, advantages: floating [T], T tokens of the whole mini-batch.
        mask: bool or 0/1 [T].
        fraction: chosen are max(1, floor(fraction T)) tokens, T without the masked ones; of equal ones the first. The
            paper's runs: 2e-3 for a model of 7B parameters, 2e-4 for 32B.

    Returns:
        bool [T].

    Raises:
        ValueError: fraction is not in (0, 1].
    """
    mask = mask.bool()
    quota = _quota(mask, fraction)
    candidates = torch.nonzero(mask).squeeze(1)
    cov = _covariances(logprobs, advantages, mask)[candidates]
    chosen = torch.zeros_like(mask)
    chosen[candidates[torch.argsort(cov, descending=True, stable=True)[:quota]]] = True
    return chosen


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    chosen: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """PPO's loss, and 0 for the tokens chosen, which keep their place in every denominator (equation 12, and verl).

    Args:
        logprobs, old_logprobs, advantages: floating [T], T tokens of a micro-batch.
        mask: bool or 0/1 [T].
        chosen: bool or 0/1 [T], from `clip_cov_tokens`.
        clip_low, clip_high: those of `ppo`. The authors' runs set both to 1. There is no dual clip, as in the
            paper and in verl.

    Returns:
        token_loss [T] and statistics: those of `ppo`, and
            pg_covfrac: tokens chosen. (verl logs these as pg_clipfrac.)
    """
    chosen = chosen.bool() & mask.bool()
    clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=0.0)
    token_loss, stats = ppo(logprobs, old_logprobs, advantages, mask, **clip)
    token_loss = torch.where(chosen, 0.0, token_loss)
    return token_loss, stats | {"pg_covfrac": chosen.to(token_loss.dtype).sum()}


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    chosen: Tensor,
    *,
    kl_cov_coef: float,
) -> Loss:
    """-r A, and + kl_cov_coef |logprobs - old_logprobs| for the tokens chosen.

    Equation 14 has KL(old || policy) there; its authors' code and verl take this distance, as here. Its gradient at equal
    policies is 0, so it acts from the second update of a step on. There is no clip.

    Args:
        logprobs, old_logprobs, advantages: floating [T], T tokens of a micro-batch.
        mask: bool or 0/1 [T].
        chosen: bool or 0/1 [T], from `kl_cov_tokens`.
        kl_cov_coef: weight of the penalty. The paper's runs: 1. verl's default: 0.1.

    Returns:
        token_loss [T] and statistics, as in `rl.objectives.policy_loss`. (verl's ppo_kl is here that of |log-ratio|.)
            pg_covfrac: tokens chosen.
    """
    mask = mask.bool()
    chosen = chosen.bool() & mask
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    token_loss = -torch.where(mask, advantages, 0.0) * log_ratio.exp()
    token_loss = token_loss + torch.where(chosen, kl_cov_coef * log_ratio.abs(), 0.0)
    return token_loss, summed(ppo_kl=-log_ratio, pg_covfrac=chosen)
