"""Estimators of the KL divergence from the reference policy, per token.

Shapes: `T` response tokens, flat. At masked positions the inputs may hold anything, NaN included: they are
replaced before the first nonlinear operation, so neither value nor gradient sees them.
"""

import torch
from torch import Tensor

from rl.objectives.log_ratio import masked_log_ratio

MAX_LOG_RATIO = 20.0
"""k3 only: the log-ratio is clamped to +- this before exp, as in verl."""
MAX_K3 = 10.0
"""k3 only: the estimate of one token is clamped to this from above, as in verl. Where it binds the gradient
is 0."""

ESTIMATORS = {
    "k1": "d",
    "abs": "|d|",
    "k2": "d^2 / 2",
    "k3": "exp(-d) - 1 + d",
    "k1+": "value of k1, gradient of k2",
    "k3+": "value of k3, gradient of k2",
    "k3-weighted": "ratio (exp(-d) - 1 + d), ratio = pi / pi_old",
}
"""Name of each estimator -> formula, with d = log pi - log pi_ref. The configuration reads this literal."""


def kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    estimator: str,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Return a one-sample estimate of KL(policy || reference) for tokens drawn from the policy.

    With d = logprobs - ref_logprobs (Schulman, 'Approximating KL divergence',
    http://joschu.net/blog/kl-approx.html):

        k1   d                     unbiased, can be negative
        abs  |d|                   not an estimate of the KL, a distance
        k2   d^2 / 2               biased, low variance
        k3   exp(-d) - 1 + d       unbiased, never negative; GRPO's choice (arXiv:2402.03300, equation 4)
        k1+  value of k1, gradient of k2
        k3+  value of k3, gradient of k2
        k3-weighted  ratio times k3, ratio = exp(logprobs - old_logprobs)  (DeepSeek-V3.2, arXiv:2512.02556,
                     equation 7)

    These are estimates of the value. As a term of the loss the gradient counts: the mean gradient of k2 is
    that of KL(policy || reference), that of k1 is 0, and that of k3 belongs to KL(reference || policy). So
    k1+ and k3+ report an unbiased value and pull with the right gradient; they are verl's estimators of the
    same names. k3-weighted does so also for tokens drawn from an older policy. By the product rule the
    gradient of ratio times k3 is ratio times d, which is ratio times that of k3+, and so it is computed.

    k3 is clamped as in verl: -d to +- MAX_LOG_RATIO, and the result to MAX_K3. The latter binds for d < -2.6
    and d > 11; such a token adds a constant 10 and pulls the policy nowhere, and k3 is then too small on
    average. k3+ has the clamped value, but keeps the gradient d everywhere.

    Args:
        logprobs: floating [T], log-probabilities of the tokens under the policy.
        ref_logprobs: floating [T], those under the reference policy.
        mask: bool or 0/1 [T], the tokens that count.
        estimator: which formula.
        old_logprobs: floating [T], those under the policy that the tokens were drawn from; k3-weighted only.

    Returns:
        [T], nats, 0 at masked positions.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator == "k3-weighted":
        assert old_logprobs is not None, "k3-weighted reads old_logprobs"
        log_ratio = masked_log_ratio(logprobs.detach(), old_logprobs, mask.bool())
        return log_ratio.exp() * kl(logprobs, ref_logprobs, mask, estimator="k3+")
    d = torch.where(mask.bool(), logprobs - ref_logprobs, 0.0)
    if estimator in ("k1+", "k3+"):
        value = kl(logprobs.detach(), ref_logprobs.detach(), mask, estimator=estimator[:-1])
        # Its value is 0 and its slope d. (k2 minus itself would also work, but its square may overflow.)
        return value + d.detach() * (d - d.detach())
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        log_ratio = (-d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # expm1, because exp(x) - 1 - x has no digit left in float32 for the small x of a healthy run.
        return (torch.expm1(log_ratio) - log_ratio).clamp(max=MAX_K3)
    raise ValueError(f"KL estimator {estimator!r} is not one of {', '.join(ESTIMATORS)}")
