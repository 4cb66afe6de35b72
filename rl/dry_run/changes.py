"""What to change in a configuration that does not fit: a search over a few keys, one or two at a time.

The engine's share of the memory is set anew in every trial: as much as the trainer's state leaves, which costs nothing.
Among the trials that fit the one with the shortest step is taken; one changed key is preferred to two, and both to more GPUs.
"""

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from rl.config.options import ConfigError, flatten
from rl.config.schema import Config, needs_engine
from rl.dry_run.estimate import Estimate, changed

LEAST_SHARE = 0.05
MORE_RANKS = (2, 4, 8)


@dataclass(frozen=True)
class Change:
    """Values of keys that would fit, and the estimate with them."""

    values: dict[str, object]
    world_size: int
    estimate: Estimate

    def words(self, before: Estimate) -> str:
        """As overrides for a command line."""
        words = [f"{key}={_text(value)}" for key, value in self.values.items()]
        if self.world_size != before.layout.world_size:
            words.append(f"--world-size {self.world_size}")
        return " ".join(words)


def cheapest_change(before: Estimate) -> Change | None:
    """The change to try first; None if nothing that is tried here fits."""
    world = before.layout.world_size
    steps = list(_single_changes(before.config, world))
    for ranks, number in [
        (world, 0),
        (world, 1),
        (world, 2),
        *((more * world, n) for more in MORE_RANKS for n in (0, 1)),
    ]:
        combinations = (dict(chosen) for chosen in itertools.combinations(steps, number))
        fitting = [
            change
            for values in combinations
            if len(values) == number and (change := _fitting(before, values, ranks)) is not None
        ]
        if fitting:
            return min(fitting, key=lambda change: change.estimate.step_seconds)
    return None


def _single_changes(config: Config, world_size: int) -> Iterator[tuple[str, object]]:
    """One key and another value at a time; those that the layout refuses are found out later."""
    training = config.training
    if not training.recompute:
        yield "training.recompute", True
    for divisor in (2, 4):
        if training.micro_batch_tokens // divisor >= 1024:
            yield "training.micro_batch_tokens", training.micro_batch_tokens // divisor
    for key, value in (("tp", training.tp), ("pp", training.pp), ("ep", training.ep)):
        for factor in (2, 4, 8):
            if value * factor <= world_size:
                yield f"training.{key}", value * factor
    if needs_engine(config):
        if training.offload in ("none", "optimizer"):
            yield "training.offload", "all"
        for factor in (2, 4, 8):
            if config.rollout.tp * factor <= world_size:
                yield "rollout.tp", config.rollout.tp * factor


def _fitting(before: Estimate, values: dict[str, object], world_size: int) -> Change | None:
    """The change with these values and a share for the engine that fits; None if there is none."""
    try:
        after = changed(before, with_values(before.config, values), world_size)
        if after.problems and after.memory.engine is not None:
            share = _share_left(after)
            if share < LEAST_SHARE:
                return None
            values = values | {"rollout.gpu_memory_utilization": share}
            after = changed(before, with_values(before.config, values), world_size)
    except ConfigError:
        return None
    return None if after.problems else Change(values, world_size, after)


def _share_left(estimate: Estimate) -> float:
    """The largest share, in hundredths and at most 0.9, that the engine can have beside the trainer's state."""
    memory = estimate.memory
    assert memory.engine is not None
    taken = memory.peak("generation")[0] - memory.engine.budget
    return min(0.9, math.floor(100 * (1 - taken / memory.hardware.memory)) / 100)


def with_values(config: Config, values: dict[str, object]) -> Config:
    """A copy of the config with other values of dotted keys that it has."""
    new, known = copy.deepcopy(config), flatten(config)
    for key, value in values.items():
        assert key in known, key
        *sections, leaf = key.split(".")
        section = new
        for name in sections:
            section = getattr(section, name)
        setattr(section, leaf, value)
    return new


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"
