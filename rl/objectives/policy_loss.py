"""Policy losses per token. `rl.objectives.aggregate` turns them into one number.

Shapes: `T` response tokens of one micro-batch, flat. At masked positions the inputs may hold anything, NaN included: they
are replaced before the first nonlinear operation, so neither value nor gradient sees them.

Every loss here is called as `loss(logprobs, old_logprobs, advantages, mask, *, ...)`:

    logprobs: floating [T], log-probabilities of the tokens under the policy being trained.
    old_logprobs: floating [T], those under the policy at the start of the step.
    advantages: floating [T], one per token.
    mask: bool or 0/1 [T], the tokens that count.

`old_logprobs` and `advantages` are constants of the methods: pass them without a graph. A loss of one token depends on
nothing but that token, so a mini-batch may be cut anywhere. It returns the loss to be minimised, [T], 0 at masked
positions, and statistics: sums over the unmasked tokens, without a graph, each a scalar tensor. Divided by the count of
unmasked tokens they are verl's metrics of the same names:

    ppo_kl: old - new log-probability, the k1 estimate of KL(old || new); log-ratio clamped. All losses have it.
    pg_clipfrac: tokens where the clip binds; each loss says when.
    pg_clipfrac_lower: tokens where a second bound does.

Throughout r = exp(logprobs - old_logprobs), A is the advantage, and sg stops the gradient.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""The log of the probability ratio is clamped to +- this before exp, as in verl; exp(20) = 5e8 is far from overflow
in float32 and bfloat16, so one outlier token cannot make the loss infinite."""
DPPO_EPS = 1e-8
"""dppo_kl only: added to the probability of all other tokens before its log, as in verl; that of a token the policy is
sure of is 0 in float32."""

Loss = tuple[Tensor, dict[str, Tensor]]


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """logprobs - old_logprobs [T], clamped to +- MAX_LOG_RATIO; 0 where the bool `mask` [T] is False."""
    return torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def summed(**stats: Tensor) -> dict[str, Tensor]:
    """Statistics [T], bool or floating, 0 at masked positions -> their sums, without a graph. The dtype is the first one's."""
    dtype = next(iter(stats.values())).dtype
    return {name: value.detach().to(dtype).sum() for name, value in stats.items()}


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> Loss:
    """Clipped surrogate loss of PPO.

        loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)     PPO, arXiv:1707.06347, equation 7, negated
        loss = min(loss, -dual_clip A)  where A < 0                   dual clip, arXiv:1912.09729

    clip_high > clip_low is the clip-higher of DAPO (arXiv:2503.14476).

    Args:
        clip_low: the ratio is clipped from below at 1 - clip_low.
        clip_high: the ratio is clipped from above at 1 + clip_high.
        dual_clip: bound of the loss for negative advantages as a factor of the advantage, > 1. 0: off.

    Returns:
        token_loss and statistics, see the module.
            pg_clipfrac: tokens where the clipped term is the larger one, so that the gradient is cut.
            pg_clipfrac_lower: tokens where the dual clip is the smaller one.

    Raises:
        ValueError: dual_clip is neither 0 nor greater than 1.
    """
    if dual_clip != 0 and dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be greater than 1, or 0 to turn it off")
    mask = mask.bool()
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
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
    return token_loss, summed(ppo_kl=-log_ratio, pg_clipfrac=binding, pg_clipfrac_lower=lower_binding)


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Loss:
    """-A logprobs: the policy gradient itself, without a ratio (Williams 1992, doi:10.1007/BF00992696).

    Right only while the policy is the one that sampled, so for one update per step. `old_logprobs` enters `ppo_kl` alone,
    which says how far that has stopped to hold. Arguments and results: see the module.
    """
    mask = mask.bool()
    token_loss = -torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs, 0.0)
    return token_loss, summed(ppo_kl=-masked_log_ratio(logprobs, old_logprobs, mask))


def gpg(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Loss:
    """Group Policy Gradient (arXiv:2504.02546), the loss of REINFORCE: what is new in GPG is the advantage.

    Its factor that makes up for groups whose samples all score alike belongs to `rl.objectives.advantages`; its mean is
    token-mean. Arguments and results: see the module.
    """
    return reinforce(logprobs, old_logprobs, advantages, mask)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """Clipped importance-sampling weight (MiniMax-M1, arXiv:2506.13585, equations 4 and 5).

        loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs

    Unlike in PPO a token outside of the bounds keeps its gradient, with a bounded weight. The paper clips from above only:
    a clip_low of 1 or more leaves the ratio unbounded from below.

    Args:
        clip_low: the ratio is clipped from below at 1 - clip_low.
        clip_high: the ratio is clipped from above at 1 + clip_high.

    Returns:
        token_loss and statistics, see the module.
            pg_clipfrac: tokens whose ratio is outside of the bounds, whatever the advantage.
    """
    mask = mask.bool()
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = torch.exp(log_ratio).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    token_loss = -weight * torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs, 0.0)
    return token_loss, summed(ppo_kl=-log_ratio, pg_clipfrac=(weight != ratio) & mask)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> Loss:
    """Soft Adaptive Policy Optimization (arXiv:2511.20347): a gate that fades instead of a clip that cuts.

        loss = -A (4 / tau) sigmoid(tau (r - 1)),    tau = tau_pos where A > 0, tau_neg elsewhere

    At r = 1 its gradient is that of PPO, -A; it falls off on both sides, faster for a greater tau, and the paper takes
    tau_neg (1.05) > tau_pos (1.0) since negative advantages raise the logits of all the tokens that were not sampled. Its
    mean is seq-mean-token-mean. At r = 1 the loss itself is -2 A / tau, so its value compares to no other loss.

    Args:
        tau_pos, tau_neg: temperatures, > 0.

    Returns:
        token_loss and statistics, see the module.

    Raises:
        ValueError: a temperature is not positive.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(
            f"SAPO's temperatures must be positive, not tau_pos = {tau_pos}, tau_neg = {tau_neg}"
        )
    mask = mask.bool()
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = torch.where(mask, advantages, 0.0)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (torch.exp(log_ratio) - 1))
    return -advantages * gate, summed(ppo_kl=-log_ratio)


def dro(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, beta: float) -> Loss:
    """Direct Reward Optimization with its penalty per token, as in verl and Tinker.

        loss = -A logprobs + beta / 2 (logprobs - old_logprobs)^2

    Its gradient at beta = tau is, up to a constant, that of the square (R - V - tau log(policy / old))^2 which DRO
    (arXiv:2405.19107, equation 4) and Kimi k1.5 (arXiv:2501.12599, section 2.3.2) minimise; there the log-ratio is that of
    the whole response. No exp, so the log-ratio is not clamped: the penalty keeps pulling an outlier back.

    Args:
        beta: weight of the penalty, > 0.

    Returns:
        token_loss and statistics, see the module.

    Raises:
        ValueError: beta is not positive.
    """
    if not beta > 0:
        raise ValueError(
            f"DRO's beta must be positive, not {beta}; without a penalty the loss is that of reinforce"
        )
    mask = mask.bool()
    token_loss, stats = reinforce(logprobs, old_logprobs, advantages, mask)
    return token_loss + 0.5 * beta * torch.where(mask, logprobs - old_logprobs, 0.0).square(), stats


def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    max_ratio: float = 20.0,
) -> Loss:
    """Divergence PPO with the binary total variation (DPPO, arXiv:2602.04879), in verl's form.

        loss = -sg(min(r, max_ratio)) A logprobs where the token is inside the trust region, else 0

    With p and q the probabilities of the sampled token under the policy and the old one, a token is outside if A > 0 and
    p - q > clip_high, or A <= 0 and q - p > clip_low. That is a distance between two distributions over (this token, any
    other), unlike PPO's r, which moves a lot for rare tokens that hardly matter.

    Args:
        clip_low, clip_high: radii of the trust region in probability, for tokens made rarer and more frequent.
        max_ratio: the ratio is truncated to this. The paper warns of small values (section 5.4); verl's
            default is 20.

    Returns:
        token_loss and statistics, see the module.
            pg_clipfrac: tokens outside of the trust region.
            pg_clipfrac_lower: tokens inside whose ratio is truncated.
    """
    mask = mask.bool()
    logprobs, old_logprobs = torch.where(mask, logprobs, 0.0), torch.where(mask, old_logprobs, 0.0)
    rise = (logprobs.exp() - old_logprobs.exp()).detach()
    inside = torch.where(advantages > 0, rise <= clip_high, rise >= -clip_low)
    return _dppo(logprobs, old_logprobs, advantages, mask, inside, max_ratio)


def dppo_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    max_ratio: float = 20.0,
) -> Loss:
    """Divergence PPO with the binary KL divergence (DPPO, arXiv:2602.04879), in verl's form.

    The loss of `dppo_tv` with another trust region. With p and q as there,

        D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    is KL(old || policy) over (this token, any other); a token is outside if A > 0, p > q and D > clip_high, or A <= 0,
    p < q and D > clip_low.

    Args:
        clip_low, clip_high: radii of the trust region in nats, for tokens made rarer and more frequent.
        max_ratio: as for `dppo_tv`.

    Returns:
        As `dppo_tv`.
    """
    mask = mask.bool()
    logprobs, old_logprobs = torch.where(mask, logprobs, 0.0), torch.where(mask, old_logprobs, 0.0)
    new, old = logprobs.detach(), old_logprobs.detach()
    # expm1, because 1 - exp(x) has no digit left in float32 for the probabilities near 1 that most tokens have.
    other, old_other = ((-torch.expm1(x)).clamp(min=0) + DPPO_EPS for x in (new, old))
    divergence = old.exp() * (old - new) + old_other * torch.log(old_other / other)
    moves_with_advantage = torch.where(advantages > 0, new > old, new < old)
    radius = torch.full_like(divergence, clip_low).masked_fill(advantages > 0, clip_high)
    return _dppo(
        logprobs, old_logprobs, advantages, mask, ~moves_with_advantage | (divergence <= radius), max_ratio
    )


def _dppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, inside: Tensor, max_ratio: float
) -> Loss:
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = torch.exp(log_ratio).detach()
    inside = inside & mask
    token_loss = torch.where(inside, -ratio.clamp(max=max_ratio) * advantages, 0.0) * logprobs
    return token_loss, summed(
        ppo_kl=-log_ratio, pg_clipfrac=mask & ~inside, pg_clipfrac_lower=inside & (ratio > max_ratio)
    )
