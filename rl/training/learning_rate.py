"""The learning rate as a pure function of the step. A checkpoint therefore holds no state for it."""

import math
from dataclasses import dataclass

from rl.config.schema import Optimizer


def learning_rate(optimizer: Optimizer, step: int, max_steps: int) -> float:
    """Return the learning rate of step `step`, 1..max_steps: linear warm-up, then decay.

    The first step's rate is above 0.
    """
    if step <= optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    done = (step - 1 - optimizer.warmup_steps) / max(1, max_steps - optimizer.warmup_steps)
    remaining = 1.0 - done if optimizer.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * remaining


@dataclass(frozen=True)
class RateSchedule:
    """The learning rate of a model in a run."""

    optimizer: Optimizer
    last_step: int
    warmup_steps: int = 0
    """Number of steps without learning before the schedule starts, for example for the policy during
    critic.warmup_steps."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step of the run."""
        return learning_rate(self.optimizer, step - self.warmup_steps, self.last_step - self.warmup_steps)
