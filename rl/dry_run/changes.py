"""A search for a change that makes a configuration fit: a few keys, one or two at a time.

Each trial gives the engine as much memory as the trainer's state leaves. Among the trials that fit, the
search proposes the one with the shortest step. It prefers one changed key to two, and both to more GPUs.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl.config.features import CLASS, is_on
from rl.config.needs import needs_engine
from rl.config.options import ConfigError, flatten
from rl.config.schema import Config
from rl.dry_run.estimate import Estimate, changed, planned

LEAST_SHARE = 0.05
"""Minimum rollout.gpu_memory_utilization that is proposed."""
TRIALS = ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (4, 0), (4, 1), (8, 0), (8, 1))
"""(factor on the number of ranks, number of changed keys) of each search round, in order of preference. For
example, (2, 1) doubles the ranks and changes one key."""


@dataclass(frozen=True)
class Change:
    """Values of keys with which the run fits, and the estimate with them."""

    values: dict[str, object]
    world_size: int
    estimate: Estimate

    def words(self, before: Estimate) -> str:
        """Return the change as overrides for a command line."""
        more = self.world_size != before.layout.num_ranks
        ranks = f"--world-size {self.world_size}" if more else ""
        return " ".join(filter(None, (overrides(before.config, self.values), ranks)))


def cheapest_change(before: Estimate) -> Change | None:
    """Return the change to try first; None if no trial fits."""
    world = before.layout.num_ranks
    steps = list(single_changes(before.config, world))
    for factor, number in TRIALS:
        combinations = (dict(some) for some in itertools.combinations(steps, number))
        trials = [fitting(before, values, factor * world) for values in combinations if len(values) == number]
        found = [change for change in trials if change is not None]
        for change in sorted(found, key=lambda change: change.estimate.step_seconds):
            if (connected := _connected(before, change)) is not None:
                return connected
    return None


def _connected(before: Estimate, change: Change) -> Change | None:
    """Return the change if it also fits with the refit's connections in its own layout.

    The engine gets a lower share if needed. Without a planned refit in `before` nothing is checked.
    """
    if before.refit is None:
        return change
    after = planned(change.estimate)
    return change if not after.problems else fitting(after, change.values, change.world_size)


def single_changes(config: Config, world_size: int) -> Iterator[tuple[str, object]]:
    """Yield (key, new value) for each single change. Invalid layouts are rejected later."""
    training = config.training
    if training.recompute != "full":
        yield "training.recompute", "full"
    for divisor in (2, 4, 8, 16):
        if training.micro_batch_tokens // divisor >= 1024:
            yield "training.micro_batch_tokens", training.micro_batch_tokens // divisor
    sizes = {f"training.{name}": getattr(training, name) for name in ("tp", "pp", "cp", "ep")}
    if is_on(config, CLASS):
        sizes = {}
        yield "training.shard", world_size
    if needs_engine(config):
        sizes["rollout.tp"] = config.rollout.tp
    for key, size in sizes.items():
        if key == "rollout.tp" and training.offload in ("none", "optimizer"):
            yield "training.offload", "all"
        yield from ((key, size * factor) for factor in (2, 4, 8) if size * factor <= world_size)


def fitting(before: Estimate, values: dict[str, object], world_size: int) -> Change | None:
    """Return the change with these values, and a lower engine's share if needed; None if it does not fit."""
    try:
        after = changed(before, with_values(before.config, values), world_size)
        if after.problems and after.memory.engine is not None and not after.hardware.is_cpu:
            share = _share_left(after)
            if share < LEAST_SHARE:
                return None
            values = values | {"rollout.gpu_memory_utilization": share}
            after = changed(before, with_values(before.config, values), world_size)
    except ConfigError:
        return None
    return None if after.problems else Change(values, world_size, after)


def _share_left(estimate: Estimate) -> float:
    """Return the largest share that the engine can have beside the trainer's state, at most 0.9.

    The share is rounded down to hundredths.
    """
    memory = estimate.memory
    assert memory.engine is not None
    taken = memory.peak("generation")[0] - memory.engine.budget
    return min(0.9, math.floor(100 * (1 - taken / memory.hardware.memory)) / 100)


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """Return a copy of the config with other values of existing dotted keys."""
    for key, value in values.items():
        config = _with_value(config, key.split("."), value)
    return config


def _with_value(section: Any, names: list[str], value: object) -> Any:
    name, *rest = names
    return replace(section, **{name: _with_value(getattr(section, name), rest, value) if rest else value})


def overrides(config: Config, values: Mapping[str, object]) -> str:
    """Return the values that differ from the config's as overrides for a command line."""
    usual = flatten(config)
    return " ".join(f"{key}={text(value)}" for key, value in values.items() if value != usual[key])


def text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"
