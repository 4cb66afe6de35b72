"""The weight of the entropy bonus, which changes from step to step so that the entropy stays above a
target."""


class EntropyController:
    """Adaptive entropy control of Skywork-OR1 (arXiv:2505.22312, section 4).

        weight_k = coef_k if entropy_k <= target, else 0
        coef_k+1 = coef_k + delta if entropy_k <= target, else coef_k - delta, within low .. high

    entropy_k is the mean entropy per token of the samples of step k, before the updates of the step. The
    bonus acts only in steps whose entropy is at or below the target, but the coefficient changes in every
    step. For example, with coef=0.01, target=0.2 and delta=0.005, entropies of 0.1, 0.3 and 0.1 give the
    weights 0.01, 0 and 0.01. The authors' code has the same bounds (`min_entropy_coeff`,
    `max_entropy_coeff`).

    The coefficient is a plain number on the host. Every rank updates its own with the same arguments, so all
    ranks have the same weight.

    Args:
        coef: first coefficient, from low to high. The paper: 0.
        target: nats per token, > 0. The paper: 0.2.
        delta: change per step, > 0. The paper: 0.005.
        low, high: bounds of the coefficient.
    """

    def __init__(self, coef: float, *, target: float, delta: float, low: float, high: float) -> None:
        self.coef, self._target, self._delta, self._low, self._high = coef, target, delta, low, high

    def update(self, entropy: float) -> float:
        """Return the weight for a step with this entropy, and move the coefficient for the next step."""
        is_low = entropy <= self._target
        weight = self.coef if is_low else 0.0
        self.coef = min(max(self.coef + (self._delta if is_low else -self._delta), self._low), self._high)
        return weight

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the coefficient of a checkpoint, within the bounds of the configuration."""
        self.coef = min(max(float(state["coef"]), self._low), self._high)
