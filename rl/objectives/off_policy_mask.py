"""Off-policy sequence mask of DeepSeek-V3.2 (arXiv:2512.02556, equation 9)."""

import torch
from torch import Tensor

from rl.objectives.log_ratio import masked_log_ratio, sample_mean
from rl.objectives.segments import expand


@torch.no_grad()
def off_policy_mask(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    bound: float,
) -> Tensor:
    """Return 0 for tokens with a negative advantage in samples far from the policy, else 1, [T].

        M_t = 0  if A_t < 0 and mean over the sample's tokens of log(pi_sampling / pi) > bound,  else 1

    If the current policy would hardly make a mistake, the mistake teaches it little and can make training
    unstable. Tokens with a positive advantage remain. The mask multiplies the policy loss. As in the paper,
    masked tokens still count in the denominators, and the KL term and the entropy bonus are not masked.

    Shapes and conventions are as in `rl.objectives.losses`. Each row of a trajectory is judged separately.

    Args:
        sampling_logprobs: floating [T], the log-probs of the engine if it returned them. The mean then
            includes the difference between engine and trainer.
        bound: nats per token, > 0.
    """
    mask = mask.bool()
    log_ratio = masked_log_ratio(sampling_logprobs, logprobs, mask)
    divergence = expand(sample_mean(log_ratio, mask, lengths), lengths, len(mask))
    return (~(mask & (advantages < 0) & (divergence > bound))).to(logprobs.dtype)
