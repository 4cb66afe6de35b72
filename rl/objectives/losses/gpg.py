"""Group Policy Gradient (arXiv:2504.02546): the loss of REINFORCE, with token-mean as its mean.

The novelty of GPG is its advantage, `rl.objectives.advantages.gpg`.
"""

from torch import Tensor

from rl.objectives.log_ratio import TokenLoss
from rl.objectives.losses.reinforce import reinforce

USES_RATIO = False
FORMULA = "-A log pi"
SOURCE = "2504.02546"


def gpg(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """Return the loss of each token [T] and statistics."""
    return reinforce(logprobs, old_logprobs, advantages, mask)
