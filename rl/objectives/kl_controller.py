"""The weight of a KL penalty: fixed, or changed from step to step so that the divergence approaches a target.

Both classes have the same interface: read `coef`, call `update` after each step, keep `state_dict` with the
checkpoint. A weight is a plain number on the host. Every rank updates its own with the same arguments, so all
ranks have the same weight.
"""

import math

MAX_ERROR = 0.2
"""Bound of the absolute relative error in one update."""


class FixedKL:
    """The constant weight of the configuration.

    `update` does not change it, and checkpoints do not contain it.
    """

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, current_kl: float, num_samples: int) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Accept any state, even the state of an AdaptiveKL, and keep the weight of the configuration."""


class AdaptiveKL:
    """Proportional control in log space (Ziegler et al., arXiv:1909.08593, section 2.2).

        error = clip((current_kl - target) / target, -0.2, 0.2)
        coef  = coef (1 + error num_samples / horizon)

    The paper has a gain of 0.1 per update. Here it is num_samples / horizon, as in the paper's code
    (lm-human-preferences) and in verl. Therefore the weight changes by at most about a fifth over `horizon`
    samples, whatever the batch size. For example, 1,024 samples at twice the target or more, with a horizon
    of 10,000, raise the weight by 0.2 * 0.1024 = 2 %.

    Args:
        init_coef: first weight, > 0, because a weight of 0 could never change.
        target: target of the divergence, > 0, in the unit of `current_kl`. The paper has 6 nats per sample. A
            run of this project uses nats per token, as verl does (whose default is 0.1).
        horizon: samples, > 0. lm-human-preferences: 10000.

    Raises:
        ValueError: an argument is not positive.
    """

    def __init__(self, init_coef: float, target: float, horizon: int) -> None:
        for name, value in (("init_coef", init_coef), ("target", target), ("horizon", horizon)):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"an adaptive KL weight needs a positive {name}, not {value}")
        self.coef = init_coef
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, num_samples: int) -> None:
        """Change the weight. Call it once per step.

        Args:
            current_kl: mean divergence of the step's samples, over all ranks.
            num_samples: samples of the step, over all ranks.

        Raises:
            ValueError: current_kl is NaN, or the horizon is so short that one step could turn the weight
                negative.
        """
        if math.isnan(current_kl):
            raise ValueError(
                "the KL divergence from the reference policy is NaN; look for NaN log-probabilities"
            )
        if MAX_ERROR * num_samples >= self.horizon:
            raise ValueError(
                f"a horizon of {self.horizon} samples is too short for steps of {num_samples}: it must "
                "exceed "
                f"{MAX_ERROR} x {num_samples}, and should be many times that"
            )
        error = min(max(current_kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the weight of a checkpoint; target and horizon come from the configuration.

        Raises:
            ValueError: the checkpoint has no weight, because it was written with a fixed weight.
        """
        if "coef" not in state:
            raise ValueError(
                "the checkpoint has no KL weight to continue from: it was written with a fixed one. Start a "
                "new run, or keep "
                "the fixed weight"
            )
        self.coef = float(state["coef"])
