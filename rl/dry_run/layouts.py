"""A search for the fastest layout on a number of ranks, for runs with a changing number of nodes."""

import itertools
from collections.abc import Iterator

from rl.config.checks import check
from rl.config.layout_checks import divisors
from rl.config.options import ConfigError
from rl.config.schema import Config, needs_engine
from rl.dry_run.changes import with_values
from rl.dry_run.estimate import estimate
from rl.dry_run.hardware import Hardware


def find_layout(config: Config, world_size: int, *, ranks_per_node: int) -> dict[str, object] | None:
    """Return the keys that the config needs on so many ranks; {} if its own layout fits, None if none does.

    Layouts that differ in training.tp, pp, ep and rollout.tp are compared by the estimate of their step.
    """
    hardware = Hardware(ranks_per_node=ranks_per_node)
    found: list[tuple[float, dict[str, object]]] = []
    for values in ({}, *_trials(config, world_size)):
        try:
            new = with_values(config, values)
            check(new)
            result = estimate(new, world_size, hardware, plan=False)
        except ConfigError:
            continue
        if not result.problems:
            if not values:
                return values
            found.append((result.step_seconds, values))
    return min(found, key=lambda trial: trial[0])[1] if found else None


def _trials(config: Config, world_size: int) -> Iterator[dict[str, object]]:
    sizes = [n for n in divisors(world_size) if n & (n - 1) == 0]
    keys = {"training.tp": sizes, "training.pp": sizes}
    if config.training.ep > 1:
        keys["training.ep"] = sizes
    if needs_engine(config):
        keys["rollout.tp"] = sizes
    for values in itertools.product(*keys.values()):
        yield dict(zip(keys, values))
