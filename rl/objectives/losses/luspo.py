"""Length-Unbiased Sequence Policy Optimization (LUSPO, arXiv:2602.05261): GSPO without division by length.

GSPO's objective divides by the length of each sample, so that the tokens of short samples have larger
gradients, and responses become shorter. LUSPO multiplies the clipped objective of a sample by its length.
This is GSPO's loss of each token with the mean seq-mean-token-sum. For example, a sample of 200 tokens weighs
twice as much as a sample of 100.
"""

from torch import Tensor

from rl.objectives.log_ratio import TokenLoss
from rl.objectives.losses.gspo import gspo

RECIPE = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-sum"}
FORMULA = "GSPO's; the mean seq-mean-token-sum multiplies it by the length of the sample"
SOURCE = "2602.05261"


def luspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Return the loss of each token [T] and the statistics of `gspo`."""
    return gspo(logprobs, old_logprobs, advantages, mask, lengths, clip_low=clip_low, clip_high=clip_high)
