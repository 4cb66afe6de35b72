"""Makes the points of a sweep: for each point, its name and the values of its config keys.

    # every combination
    grid:   {training.optimizer.lr: [1e-6, 2e-6], rollout.samples_per_prompt: [4, 8, 16]}
    # first value with first value, second with second
    zip:    {training.tp: [1, 2], training.pp: [2, 1]}
    # random draws
    random: {points: 10, seed: 0, keys: {objective.clip_high: {uniform: [0.2, 0.3]}}}
    # run.seed of each point
    seeds:  [1, 2, 3]
    # points to leave out, points to keep
    skip:   ["training.tp * training.pp > 8"]
    only:   ["rollout.samples_per_prompt > 4 or training.optimizer.lr < 2e-6"]

The points are all combinations of grid, zip, random and seeds that satisfy the conditions. The name of a
point depends only on its own values. When you add other points, it therefore keeps its name and its run.
"""

import itertools
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launch.conditions import holds
from rl.config.options import ConfigError, advice_on_key, as_override, show
from rl.config.point_names import name_of, short_names
from rl.config.schema import Config

SEED = "run.seed"


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    values: Mapping[str, Any]
    """Dotted key -> value."""

    @property
    def overrides(self) -> list[str]:
        """Return the values as arguments of train_rl.py."""
        return [as_override(key, value) for key, value in self.values.items()]


def make_points(sweep: Mapping[str, Any], known: Mapping[str, Any]) -> list[SweepRun]:
    """Return the points of a sweep file's grid, zip, random and seeds. Seeds vary fastest.

    known: dotted key -> value, for every key of the config without the sweep; the conditions may use these
    keys. Raises ConfigError for an invalid sweep.
    """
    parts = [
        _grid(_mapping(sweep, "grid")),
        _zip(_mapping(sweep, "zip")),
        _random(_mapping(sweep, "random")),
        _seeds(sweep.get("seeds")),
    ]
    keys = [key for part in parts for key in part[0]]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"the sweep gives {key} twice; name it in one of grid, zip, random and seeds.")
        if key not in known:
            advice = advice_on_key(Config, key)
            raise ConfigError(f"the sweep varies {key}, which is not a config key; {advice}")
    if not keys:
        raise ConfigError(
            "the sweep has none of grid, zip, random and seeds, so there is nothing to sweep; add one."
        )
    combined = [
        dict(itertools.chain.from_iterable(part.items() for part in parts))
        for parts in itertools.product(*parts)
    ]
    kept = [values for values in combined if _is_selected(sweep, {**known, **values})]
    if not kept:
        raise ConfigError("the conditions of the sweep (skip, only) leave no point.")
    short = short_names(keys)
    names = [name_of(values, short) for values in kept]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        equal = len({repr(values) for name, values in zip(names, kept) if name == twice[0]}) == 1
        why = "remove one of them" if equal else "names keep only letters, digits and _.+-, so change a value"
        raise ConfigError(f"two points of the sweep are both called {twice[0]}; {why}.")
    return [SweepRun(name, values) for name, values in zip(names, kept)]


def _mapping(sweep: Mapping[str, Any], section: str) -> dict:
    found = sweep.get(section) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{section} of the sweep is {show(found)}, but must be a mapping of keys.")
    return found


def _grid(section: dict) -> list[dict]:
    lists = [_list("grid", key, values) for key, values in section.items()]
    return [dict(zip(section, values)) for values in itertools.product(*lists)]


def _zip(section: dict) -> list[dict]:
    lists = [_list("zip", key, values) for key, values in section.items()]
    if len({len(values) for values in lists}) > 1:
        lengths = ", ".join(f"{key} {len(values)}" for key, values in zip(section, lists))
        raise ConfigError(f"the lists of zip must be equally long; found {lengths} values.")
    return [dict(zip(section, values)) for values in zip(*lists)] or [{}]


def _seeds(seeds: Any) -> list[dict]:
    if seeds is None:
        return [{}]
    is_number = type(seeds) is int and seeds > 0
    numbers = list(range(1, seeds + 1)) if is_number else _list("the sweep", "seeds", seeds)
    return [{SEED: number} for number in numbers]


def _list(section: str, key: str, values: Any) -> list:
    if not isinstance(values, list) or not values:
        number = " or a number of at least 1" if key == "seeds" else ""
        raise ConfigError(f"{key} of {section} is {show(values)}, but must be a list of values{number}.")
    return values


def _random(section: dict) -> list[dict]:
    """Return the random draws, one dict per point.

    A draw depends only on the seed, the point's number and the key, so adding points changes no earlier draw.
    """
    if not section:
        return [{}]
    if section.keys() != {"points", "seed", "keys"}:
        raise ConfigError(f"random of the sweep has {', '.join(section)}; it takes points, seed and keys.")
    if not isinstance(section["keys"], dict) or type(section["points"]) is not int or section["points"] < 1:
        raise ConfigError(
            f"random of the sweep is {show(section)}, but points must be a number of at least 1, and keys a "
            "mapping of keys to distributions."
        )
    return [
        {
            key: _draw(key, spec, random.Random(f"{section['seed']}.{number}.{key}"))
            for key, spec in section["keys"].items()
        }
        for number in range(section["points"])
    ]


def _draw(key: str, spec: Any, rng: random.Random) -> Any:
    if isinstance(spec, dict) and len(spec) == 1:
        ((kind, values),) = spec.items()
        if kind == "choice" and isinstance(values, list) and values:
            return rng.choice(values)
        if isinstance(values, list) and len(values) == 2 and all(isinstance(v, (int, float)) for v in values):
            low, high = values
            if kind == "uniform":
                return _rounded(rng.uniform(low, high))
            if kind == "log_uniform" and 0 < low <= high:
                return _rounded(math.exp(rng.uniform(math.log(low), math.log(high))))
            if kind == "integer" and all(isinstance(v, int) for v in values):
                return rng.randint(low, high)
    raise ConfigError(
        f"random draws {key} from {show(spec)}; write one of uniform: [low, high], log_uniform: [low, high] "
        "(above 0), integer: [first, last], choice: [values]."
    )


def _rounded(value: float) -> float:
    """Round to four significant digits, so that the point's name can show the exact value."""
    return float(f"{value:.4g}")


def _is_selected(sweep: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    for section in ("skip", "only"):
        conditions = sweep.get(section) or []
        if not isinstance(conditions, list) or not all(
            isinstance(condition, str) for condition in conditions
        ):
            raise ConfigError(
                f"{section} of the sweep is {show(conditions)}, but must be a list of conditions in quotes."
            )
        if any(holds(condition, values) == (section == "skip") for condition in conditions):
            return False
    return True


def tasks_text(tasks: Iterable[int]) -> str:
    """Return task numbers in the format of sbatch --array, for example 0,2-5."""
    out: list[list[int]] = []
    for task in sorted(tasks):
        if out and out[-1][1] == task - 1:
            out[-1][1] = task
        else:
            out.append([task, task])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
