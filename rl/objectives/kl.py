"""Estimators of the KL divergence from the reference policy, per token.

Shapes: `T` response tokens, flat. At masked positions the inputs may hold anything, including NaN. They are
replaced there before the first nonlinear operation, so they affect neither the value nor the gradient.
"""

import torch
from torch import Tensor

from rl.objectives.log_ratio import masked_log_ratio

MAX_LOG_RATIO = 20.0
"""k3 only: bound of the absolute log-ratio before exp, as in verl."""
MAX_K3 = 10.0
"""k3 only: upper bound of the estimate of one token, as in verl. Beyond it the gradient is 0."""

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

    The remarks above are about the value. In a term of the loss, the gradient matters. The mean gradient of
    k2 is the gradient of KL(policy || reference). The mean gradient of k1 is 0, and the mean gradient of k3
    is the gradient of KL(reference || policy). k1+ and k3+ have an unbiased value and the right gradient;
    verl has the same names for them. k3-weighted has both even for tokens drawn from an older policy. By the
    product rule, the gradient of ratio times k3 is ratio times d, so it is computed as ratio times the
    gradient of k3+.

    For example, a token with d = 0.1 has k1 = 0.1, k2 = 0.005 and k3 = 0.0048.

    k3 is clamped as in verl: -d to +- MAX_LOG_RATIO, and the result to MAX_K3, which takes effect for d <
    -2.6 and for d > 11. Such a token adds a constant 10 without a gradient, so the mean of k3 is then too
    small. k3+ has the clamped value, but its gradient is d everywhere.

    Args:
        logprobs: floating [T], log-probabilities of the tokens under the policy.
        ref_logprobs: floating [T], log-probabilities under the reference policy.
        mask: bool or 0/1 [T], the tokens that count.
        estimator: which formula.
        old_logprobs: floating [T], log-probabilities under the policy that drew the tokens; k3-weighted only.

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
        # This term has the value 0 and the slope d. (k2 minus itself would also work, but k2 may overflow.)
        return value + d.detach() * (d - d.detach())
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        log_ratio = (-d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # expm1 is used because in float32 exp(x) - 1 - x loses all digits for the small x of a healthy run.
        return (torch.expm1(log_ratio) - log_ratio).clamp(max=MAX_K3)
    raise ValueError(f"KL estimator {estimator!r} is not one of {', '.join(ESTIMATORS)}")
