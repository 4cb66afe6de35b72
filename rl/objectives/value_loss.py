"""Loss of the critic per token, and the share of the returns' variance that it explains.

Shapes: `T` response tokens, flat. At masked positions the inputs may hold anything, including NaN. They are
replaced there before the first nonlinear operation, so they affect neither the value nor the gradient.
"""

import torch
from torch import Tensor

from rl.objectives.log_ratio import TokenLoss, summed


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float
) -> TokenLoss:
    """Return the squared error of the values, clipped so that moving far from the old values gains nothing.

        loss = 1/2 max((values - returns)^2, (clip(values, old_values - clip, old_values + clip) - returns)^2)

    This is the clip of OpenAI's PPO (baselines, ppo2; Engstrom et al., arXiv:2005.12729, section 3), with
    verl's factor of 1/2. A value that has moved by more than `clip` towards its return gets no gradient. A
    value that has moved away from its return keeps its gradient. For example, with clip=0.2, an old value of
    0.5 and a return of 1, a value of 0.8 gets no gradient.

    Args:
        values: floating [T], of the critic being trained.
        old_values: floating [T], at the start of the step, without a graph.
        returns: floating [T], without a graph.
        mask: bool or 0/1 [T], the tokens that count.
        clip: how far values may move, in units of the return. 0: no clip, the plain squared error.

    Returns:
        token_loss [T], 0 at masked positions, and statistics: sums over the unmasked tokens, without a graph,
        each a scalar tensor. Divided by the count of unmasked tokens they are verl's metrics of the same
            names: vf_clipfrac: tokens where the clipped term is the larger one, so that the gradient is cut.
            vpred_mean: values.

    Raises:
        ValueError: clip is negative.
    """
    if not clip >= 0:
        raise ValueError(f"clip is {clip}; it must be positive, or 0 to turn it off")
    mask = mask.bool()
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    error = (values - returns).square()
    binding = torch.zeros_like(mask)
    if clip > 0:
        clipped_error = (values.clamp(old_values - clip, old_values + clip) - returns).square()
        binding = clipped_error > error
        error = torch.maximum(error, clipped_error)
    return 0.5 * error, summed(vpred_mean=values, vf_clipfrac=binding)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns).

    It is 1 for a perfect critic, 0 for a constant critic, and negative for a worse critic. It must be
    computed over the whole batch: the mean of the fractions of parts is another number.

    Args:
        values: floating [T], of the critic before its update, so that the values do not depend on these
            returns.
        returns: floating [T].
        mask: bool or 0/1 [T], the tokens that count.

    Returns:
        The fraction, computed in float64; NaN if all the returns are equal or there is no token.
    """
    mask = mask.bool()
    values, returns = values[mask].double(), returns[mask].double()
    variance = returns.var(correction=0) if len(returns) else returns.new_zeros(())
    if variance == 0:
        return float("nan")
    return 1 - float((returns - values).var(correction=0) / variance)
