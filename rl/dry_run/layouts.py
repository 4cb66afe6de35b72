"""Searches for the fastest configurations on a number of ranks (`lockstep plan`), and for a layout for runs
with a changing number of nodes."""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from rl.config.checks import check
from rl.config.layout_checks import divisors
from rl.config.needs import needs_engine
from rl.config.options import ConfigError
from rl.config.roles import Roles
from rl.config.schema import Config
from rl.dry_run.changes import Change, fitting, with_values
from rl.dry_run.estimate import Estimate, estimate
from rl.dry_run.hardware import GIB, Hardware
from rl.dry_run.memory import estimate_memory
from rl.dry_run.shape import ModelShape, models_of
from rl.models.by_class import MARK

TRIES = 96
"""Number of configurations that a search estimates."""
STAGES = {
    "training.recompute": ("none", "selective", "full"),
    "training.offload": ("none", "optimizer", "all"),
}
"""Keys with values in an order, of which a search tries the neighbours."""
ALONE: dict[str, object] = {
    **dict.fromkeys(("training.tp", "training.pp", "training.vpp", "training.cp", "training.ep"), 1),
    **{
        "training.etp": 0,
        "training.shard": 0,
        "rollout.tp": 1,
        "rollout.ep": 1,
        "rollout.dp_attention": False,
    },
}
"""The layout of one rank."""


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
    if MARK in before.models["policy"].hf:
        sizes["training.shard"] = training.shard or before.layout.shard
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
    best = best_layout(config, world_size, hardware, models_of(config, shape=shape))
    return None if best is None or best[1].problems else best[0]


def best_layout(
    config: Config, world_size: int, hardware: Hardware, models: tuple[dict[str, ModelShape], list[str]]
) -> tuple[dict[str, object], Estimate] | None:
    """Return the keys of the best layout on so many ranks, and its estimate; None if none is valid.

    If the config's own layout fits, it is the best one; else the fitting layout with the shortest step, or if
    none fits the one that lacks the least memory. models: as for `estimate`.
    """
    found: list[tuple[float, float, dict[str, object], Estimate]] = []
    for values in ({}, *_trials(config, world_size)):
        with suppress(ConfigError):
            new = with_values(config, values)
            result = estimate(new, world_size, hardware, models=models, plan=False)
            if not values and not result.problems:
                return values, result
            found.append((_lacking(result), result.step_seconds, values, result))
    for *_, values, result in sorted(found, key=lambda trial: trial[:2]):
        with suppress(ConfigError):
            check(with_values(config, values))  # only now, because it takes longer than an estimate
            return values, result
    return None


def _lacking(found: Estimate) -> float:
    """Return the bytes that a rank lacks in the phase that lacks most; 0 if the run fits."""
    phases = ("training", "refit", "generation") if found.memory.engine else ("training",)
    largest = max(found.memory.peak(phase)[0] for phase in phases)
    return max(1.0, largest - found.hardware.memory) if found.problems else 0.0


def least_ranks(config: Config, models: Mapping[str, ModelShape], hardware: Hardware) -> tuple[int, float]:
    """Return the smallest number of ranks that can hold weights, gradients and optimizer state, and the GiB
    of these.

    A layout may need more ranks, for activations and for the engine's weights.
    """
    alone = replace(with_values(config, ALONE), roles=Roles())
    (stage,) = estimate_memory(alone, 1, models, hardware).stages
    return max(1, math.ceil(stage.state / (hardware.memory - hardware.reserve))), stage.state / GIB


def _trials(config: Config, world_size: int) -> Iterator[dict[str, object]]:
    sizes = [n for n in divisors(world_size) if n <= 8 or n & (n - 1) == 0]
    keys = {"training.tp": sizes, "training.pp": sizes}
    if config.training.ep > 1:
        keys["training.ep"] = sizes
    if needs_engine(config):
        keys["rollout.tp"] = sizes
    shared = max(n for n in sizes if n <= config.rollout.ep and n & (n - 1) == 0)
    for values in itertools.product(*keys.values()):
        if world_size % (values[0] * values[1]) == 0:
            layout: dict[str, object] = dict(zip(keys, values))
            if config.rollout.ep > 1:
                layout["rollout.ep"] = shared if config.rollout.dp_attention else values[-1]
            if config.training.vpp > 1 and values[1] == 1:
                layout["training.vpp"] = 1
            yield layout
