"""Searches for the fastest configurations on a number of ranks (`lockstep plan`), and for a layout for runs
with a changing number of nodes."""

import heapq
import itertools
import math
from collections.abc import Iterator

from rl.config.checks import check
from rl.config.layout_checks import divisors
from rl.config.needs import needs_engine
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.dry_run.changes import Change, fitting, with_values
from rl.dry_run.estimate import Estimate, estimate
from rl.dry_run.hardware import Hardware
from rl.dry_run.shape import models_of

TRIES = 96
"""Number of configurations that a search estimates."""
STAGES = {
    "training.recompute": ("none", "selective", "full"),
    "training.offload": ("none", "optimizer", "all"),
}
"""Keys with values in an order, of which a search tries the neighbours."""


def fastest(before: Estimate, *, tries: int = TRIES) -> list[Change]:
    """Return the five fitting configurations with the shortest estimated steps, the fastest first.

    The search begins with the given config, and again and again tries the neighbours of the fastest config
    that it has not left yet: twice or half of a parallel size, or the next divisor of the ranks, twice or
    half of the micro-batch, another recomputation or offload. A change without effect on the seconds is not
    listed.

    tries: maximum number of estimates.
    """
    world = before.layout.num_ranks
    seen: set[tuple[tuple[str, object], ...]] = {()}
    found: list[Change] = []
    queue: list[tuple[float, int, dict[str, object]]] = []

    def visit(values: dict[str, object]) -> None:
        change = fitting(before, values, world)
        seconds = math.inf if change is None else change.estimate.step_seconds
        if change is not None and all(seconds != other.estimate.step_seconds for other in found):
            found.append(change)
        heapq.heappush(queue, (seconds, len(seen), values))

    visit({})
    while queue and len(seen) < tries:
        _, _, values = heapq.heappop(queue)
        for key, value in _neighbours(with_values(before.config, values), before, world):
            new = values | {key: value}
            if new.get("training.pp") == 1:
                new["training.vpp"] = 1
            place = tuple(sorted(new.items()))
            if place not in seen and len(seen) < tries:
                seen.add(place)
                try:
                    check(with_values(before.config, new))
                except ConfigError:
                    continue
                visit(new)
    return sorted(found, key=lambda change: change.estimate.step_seconds)[:5]


def _neighbours(config: Config, before: Estimate, world_size: int) -> Iterator[tuple[str, object]]:
    training = config.training
    sizes = {f"training.{name}": getattr(training, name) for name in ("tp", "pp", "cp")}
    if before.models["policy"].num_experts:
        sizes["training.ep"] = training.ep
    if needs_engine(config):
        sizes["rollout.tp"] = config.rollout.tp
    for key, size in sizes.items():
        fitting_sizes = divisors(world_size)
        larger = [n for n in fitting_sizes if n > size]
        smaller = [n for n in fitting_sizes if n < size]
        for new, others in ((size * 2, larger[:1]), (size // 2, smaller[-1:])):
            yield from ((key, n) for n in ([new] if new in fitting_sizes else others))
    for tokens in (training.micro_batch_tokens * 2, training.micro_batch_tokens // 2):
        yield "training.micro_batch_tokens", tokens
    for key, stages in STAGES.items():
        value = getattr(training, key.rpartition(".")[2])
        if value in stages and not (key == "training.offload" and not needs_engine(config)):
            place = stages.index(value)
            yield from ((key, new) for new in stages[max(0, place - 1) : place + 2] if new != value)


def find_layout(
    config: Config, world_size: int, hardware: Hardware, *, shape: str = ""
) -> dict[str, object] | None:
    """Return the keys that the config needs on so many ranks; {} if its own layout fits, None if none does.

    Layouts that differ in training.tp, pp, ep and rollout.tp are compared by the estimate of their step.
    shape: as in `estimate`.
    """
    models = models_of(config, shape=shape)
    found: list[tuple[float, dict[str, object]]] = []
    for values in ({}, *_trials(config, world_size)):
        try:
            new = with_values(config, values)
            check(new)
            result = estimate(new, world_size, hardware, models=models, plan=False)
        except ConfigError:
            continue
        if not result.problems:
            if not values:
                return values
            found.append((result.step_seconds, values))
    return min(found, key=lambda trial: trial[0])[1] if found else None


def _trials(config: Config, world_size: int) -> Iterator[dict[str, object]]:
    sizes = [n for n in divisors(world_size) if n <= 8 or n & (n - 1) == 0]
    keys = {"training.tp": sizes, "training.pp": sizes}
    if config.training.ep > 1:
        keys["training.ep"] = sizes
    if needs_engine(config):
        keys["rollout.tp"] = sizes
    for values in itertools.product(*keys.values()):
        yield dict(zip(keys, values))
