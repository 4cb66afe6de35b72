"""Checks which tokens of a mini-batch a loss selects (`objective.top_entropy`, kl-cov and clip-cov).

The second source is the output of the update's own pass, and the formula of the selection, written again.
Selections of a user's loss have no formula here.
"""

from typing import Any

import numpy as np

from rl.checks.batches import CheckFailed, token_place
from rl.config.objective import Objective
from rl.data.batch import Batch

SHARE = 0.1
"""Share of the selected tokens that may be wrong, because rounding may route them to other experts."""


def selects_by(goal: Objective) -> str:
    """Return the output of the model by which tokens are selected; "" if there is no formula."""
    if goal.top_entropy < 1:
        return "entropy"
    return "logprobs" if goal.loss in ("kl-cov", "clip-cov") else ""


def check_selection(
    batch: Batch, samples: list[int], values: np.ndarray, goal: Objective, eps: float
) -> None:
    """Raise CheckFailed unless `selected_tokens` of a mini-batch are those of the config.

    values: output `selects_by` of the present weights at each token, float64 [T]. eps: of the model's dtype.
    """

    def option(name: str) -> Any:
        return goal.kwargs.get(name, getattr(goal, name, None))

    index = batch.tokens_of(samples)
    index = index[batch.mask[index] > 0]
    if not len(index):
        return
    own, slack = values[index.numpy()], eps**0.5
    selected = batch.extra["selected_tokens"][index].numpy() > 0
    is_candidate, what, key = np.ones(len(own), bool), "entropy", f"top_entropy={goal.top_entropy:g}"
    fraction = goal.top_entropy
    if goal.top_entropy == 1:
        fraction, what, key = option("cov_fraction"), "covariance", f"loss={goal.loss}"
        advantages = batch.column("advantages")[index].double().numpy()
        centred = advantages - advantages.mean()
        own, slack = (own - own.mean()) * centred, slack * float(np.abs(centred).max())
    number = max(1, int(fraction * len(own)))
    lowest = np.partition(own, -number)[-number] - slack
    if goal.loss == "clip-cov" and goal.top_entropy == 1:
        lowest, is_candidate = option("cov_low") - slack, own <= option("cov_high") + slack
    wrong = selected & ~(is_candidate & (own >= lowest))
    is_short = goal.loss != "clip-cov" and selected.sum() < number
    is_long = goal.top_entropy == 1 and selected.sum() > number
    if wrong.sum() > 1 + SHARE * selected.sum() or is_short or is_long:
        raise CheckFailed(
            f"selection check: {int(selected.sum())} tokens are selected by objective.{key}, which selects "
            f"{number} of {len(own)} by their {what}, and {int(wrong.sum())} of them are wrong: "
            f"{token_place(batch, int(index[wrong.argmax()]))} has the {what} {own[wrong.argmax()]:.4g}, "
            f"below {lowest:.4g}."
        )
