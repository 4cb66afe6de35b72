"""Policy losses per token. `rl.objectives.aggregate` turns them into one number.

Shapes: `T` response tokens, flat. At masked positions the inputs may hold anything, NaN included: they are replaced before
the first nonlinear operation, so neither value nor gradient sees them.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""The log of the probability ratio is clamped to +- this before exp, as in verl; exp(20) = 5e8 is far from overflow
in float32 and bfloat16, so one outlier token cannot make the loss infinite."""


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate loss of PPO, to be minimised.

    With r = exp(logprobs - old_logprobs) and A the advantage:

        loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)     PPO, arXiv:1707.06347, equation 7, negated
        loss = min(loss, -dual_clip A)  where A < 0                   dual clip, arXiv:1912.09729

    clip_high > clip_low is the clip-higher of DAPO (arXiv:2503.14476). `old_logprobs` and `advantages` are constants of
    the method: pass them without a graph.

    Args:
        logprobs: floating [T], log-probabilities of the tokens under the policy being trained.
        old_logprobs: floating [T], those under the policy at the start of the step.
        advantages: floating [T], one per token.
        mask: bool or 0/1 [T], the tokens that count.
        clip_low: the ratio is clipped from below at 1 - clip_low.
        clip_high: the ratio is clipped from above at 1 + clip_high.
        dual_clip: bound of the loss for negative advantages as a factor of the advantage, > 1. 0: off.

    Returns:
        token_loss [T], 0 at masked positions, and statistics: sums over the unmasked tokens, without a graph, each a
        scalar tensor. Divided by the count of unmasked tokens they are verl's metrics of the same names:
            ppo_kl: old - new log-probability, the k1 estimate of KL(old || new); log-ratio clamped.
            pg_clipfrac: tokens where the clipped term is the larger one, so that the gradient is cut.
            pg_clipfrac_lower: tokens where the dual clip is the smaller one.

    Raises:
        ValueError: dual_clip is neither 0 nor greater than 1.
    """
    if dual_clip != 0 and dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be greater than 1, or 0 to turn it off")
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = torch.where(mask, advantages, 0.0)
    ratio = torch.exp(log_ratio)

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    token_loss = torch.maximum(unclipped, clipped)
    binding = clipped > unclipped

    lower_binding = torch.zeros_like(mask)
    if dual_clip != 0:
        bound = -advantages * dual_clip
        lower_binding = (advantages < 0) & (token_loss > bound)
        token_loss = torch.where(lower_binding, bound, token_loss)

    stats = {"ppo_kl": -log_ratio, "pg_clipfrac": binding, "pg_clipfrac_lower": lower_binding}
    return token_loss, {name: value.detach().to(token_loss.dtype).sum() for name, value in stats.items()}
