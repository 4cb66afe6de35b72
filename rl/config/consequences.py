"""Defaults that follow from other keys: what a form of run needs is set, unless the config says otherwise.

A key that the config gives is never changed. `rl.config.exclusions` refuses it if it does not suit the form.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl.config.correction import RolloutCorrection
from rl.config.declarations import describe

if TYPE_CHECKING:
    from rl.config.schema import Config


@dataclass(frozen=True)
class Consequence:
    """A key with a default that follows from others."""

    key: str
    value: Any
    holds: "Callable[[Config], bool]"
    reason: str


def _learns_from_other_weights(config: "Config") -> bool:
    """Return whether a policy loss gets tokens of older or quantised weights, and no correction is chosen."""
    is_older = config.rollout.carry_over or (config.roles.is_on and config.roles.lag > 0)
    is_other = is_older or config.rollout.quantization == "fp8"
    is_chosen = config.rollout_correction != RolloutCorrection()
    return is_other and not is_chosen and config.objective.loss != "none"


def _is_per_sample(config: "Config") -> bool:
    loss = config.objective.chosen[1]
    return loss is not None and loss.per_sample


CONSEQUENCES = (
    Consequence(
        "rollout_correction.truncate_tokens",
        2.0,
        lambda config: _learns_from_other_weights(config) and not _is_per_sample(config),
        "tokens of older or quantised weights need a correction",
    ),
    Consequence(
        "rollout_correction.truncate_samples",
        2.0,
        lambda config: _learns_from_other_weights(config) and _is_per_sample(config),
        "tokens of older or quantised weights need a correction, and objective.loss is one number per sample",
    ),
    Consequence(
        "agents.order",
        "waves",
        lambda config: config.agents.is_on and config.rollout.deterministic,
        "rollout.deterministic=true must not depend on how long environments take",
    ),
    Consequence(
        "adapter.in_engine",
        "adapter",
        lambda config: config.sweep.is_on,
        "one engine holds the adapters of all points of sweep.adapters",
    ),
    Consequence(
        "training.shared_prefix",
        False,
        lambda config: config.training.mtp.head_lr > 0,
        "the state of the head at the last token of a prompt depends on the response",
    ),
)


def consequences(config: "Config") -> Iterator[Consequence]:
    """Yield what follows from a config."""
    yield from _published(config)
    yield from (each for each in CONSEQUENCES if each.holds(config))


def _published(config: "Config") -> Iterator[Consequence]:
    """Yield the published keys of a loss that replaces the default loss of the algorithm."""
    name, (_, loss) = config.objective.loss, config.objective.chosen
    if loss is None or name == describe(config.algorithm).defaults.get("objective.loss"):
        return
    for key, value in loss.recipe.items():
        yield Consequence(
            f"objective.{key}", value, lambda config: True, f"objective.loss={name} was so published"
        )
