"""Compares the log-probs of sampled tokens with the entropy of their distribution."""

import math

import numpy as np
from torch import Tensor

from rl.checks.batches import RISK, CheckFailed
from rl.data.batch import Batch

FADE = 0.95
"""Factor by which the sums decay in each step, so that an error that appears late is not diluted."""
SMALL_VOCABULARY = 4096
"""Vocabulary below which `DrawnEntropy` cuts as for this one."""
ENTROPY_SLACK = 8
"""Divisor of the bound for log-probs: the mean of -log q may differ from the entropy by the quotient."""


class DrawnEntropy:
    """Compares the log-probs of sampled tokens with the entropy of their distribution.

    If a token x is drawn from q, the expectation of -log q(x) is the entropy H of q. With -log q cut off at
    b, the sum of the differences is a martingale. Its terms are at most b, and their conditional variances
    are at most b H. Let V be the sum of b H. By Freedman's inequality (1975) the sum exceeds a with a
    probability of at most exp(-a^2 / (2 (V + a b / 3))).

    vocab_size: number V of tokens of the vocabulary. It determines b. The cut at b lowers the mean by at most
        V b exp(-b). With a small vocabulary this hides small errors, so a larger b is tried, too.
    """

    def __init__(self, vocab_size: int):
        cuts = {2 * math.log(size) for size in (vocab_size, max(vocab_size, SMALL_VOCABULARY))}
        self._lost = {cut: vocab_size * cut * math.exp(-cut) for cut in cuts}
        self._sums = dict.fromkeys(cuts, np.zeros(3))
        """Sum of the differences, sum of the entropies, and number of tokens, float64 [3], for each b."""

    def check(self, batch: Batch, entropy: Tensor, counted: Tensor, *, slack: float) -> None:
        """Raise CheckFailed if the tokens were not drawn from the engine's distribution.

        entropy: by the trainer, float32 [T]. counted: tokens of the present weights, bool [T]. slack: mean
        difference that rounding may cause, in nats.
        """
        assert batch.rollout_logprobs is not None
        own = entropy[counted].double().clamp(min=0.0)
        surprise = -batch.rollout_logprobs[counted].double()
        for cut, lost in self._lost.items():
            step = np.array([float((surprise.clamp(max=cut) - own).sum()), float(own.sum()), len(own)])
            self._sums[cut] = step + self._sums[cut] * (FADE, FADE**2, FADE)
            for total, entropies, count in (step, self._sums[cut]):
                first = -math.log(RISK / 2) * cut / 3
                limit = first + math.sqrt(first**2 - 2 * math.log(RISK / 2) * cut * entropies)
                limit += (slack + (lost if total < 0 else 0.0)) * count
                if abs(total) > limit:
                    raise CheckFailed(
                        f"entropy check: over the last {count:.0f} sampled tokens the mean of -log q is "
                        f"{total / count:+.3g} nats from the entropy of q, more than chance explains "
                        f"({limit / count:.2g}, probability below {RISK:g}): the tokens were drawn from "
                        "another distribution, with another temperature, penalty or truncation."
                    )
