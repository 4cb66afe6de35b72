"""Group Sequence Policy Optimization in its token form (GSPO-token, arXiv:2507.18071, equations 13 and 14).

    s   = exp(min(mean over the sample of (logprobs - old_logprobs), 10))
    s_t = sg(s) exp(logprobs_t - sg(logprobs_t))
    loss_t = max(-s_t A_t, -clip(s_t, 1 - clip_low, 1 + clip_high) A_t)

Every token of a sample has the same ratio, so the clip keeps or drops together all its tokens with advantages
of one sign. With one advantage per sample and seq-mean-token-mean, value and gradient equal GSPO's (equation
5). The paper's bounds are narrow, 3e-4 and 4e-4: s is a geometric mean and moves far less than the ratio of a
token. For example, if one of 1,000 tokens has the ratio 2 and the others 1, s is 1.0007.
"""

import torch
from torch import Tensor

from rl.objectives.log_ratio import TokenLoss, masked_log_ratio, sample_mean, summed
from rl.objectives.segments import expand

RECIPE = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"}
FORMULA = "PPO's with the sample's ratio exp(mean log-ratio), gradient through each token"
SOURCE = "2507.18071"

MAX_LOG_SAMPLE_RATIO = 10.0
"""Log of the largest ratio of a sample, as in verl. A ratio of e^10 = 22,026 means that training has
diverged; the bound keeps the loss finite, and beyond it the gradient is 0."""


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Return the loss of each token [T] and statistics.

    Args:
        clip_low, clip_high: s is clipped to 1 - clip_low .. 1 + clip_high.

    Statistics:
        pg_clipfrac: tokens where the clipped term is the larger one, so that the gradient is cut.
    """
    mask = mask.bool()
    logprobs, old_logprobs = torch.where(mask, logprobs, 0.0), torch.where(mask, old_logprobs, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    # The mean is capped, not the tokens: one outlier among many tokens needs no cap, and the paper has none.
    log_s = expand(sample_mean((logprobs - old_logprobs).detach(), mask, lengths), lengths, len(mask))
    ratio = (log_s + (logprobs - logprobs.detach())).clamp(max=MAX_LOG_SAMPLE_RATIO).exp()

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), summed(
        ppo_kl=-masked_log_ratio(logprobs, old_logprobs, mask), pg_clipfrac=clipped > unclipped
    )
