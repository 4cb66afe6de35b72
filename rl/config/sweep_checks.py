"""The points of a sweep in one job (`sweep.adapters`): their configs, and what may differ between them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl.config.needs import algorithm_of
from rl.config.options import ConfigError, Files, advice_on_key, as_override, flatten, listed, show
from rl.config.paths import literal
from rl.config.point_names import name_of, short_names
from rl.config.run_models import run_models
from rl.config.schema import Config, load_config
from rl.config.sweep import Sweep

VARYING = (
    "algorithm",
    "run.seed",
    "run.max_steps",
    "data.curriculum",
    "data.shuffle",
    "adapter.kind",
    "adapter.rank",
    "adapter.alpha",
    "adapter.init",
    "adapter.path",
    "training.optimizer.",
    "training.epochs",
    "training.prompts_per_minibatch",
    "objective.",
    "rollout_correction.",
    "preference.",
    "dynamic_sampling.",
)
"""Keys, and sections with a dot at their end, that may differ between points.

All others shape the base model, the engine or the data, which the points share.
"""

OWN_MODELS = {"critic", "implicit_reward"}
"""Needs of algorithms that train a second model."""


def load_points(path: Files, overrides: Sequence[str]) -> list[Config]:
    """Return the config of each point of `sweep.adapters`, in order; [] without a sweep.

    A point's directory is its name in run.dir. Raises ConfigError, which names the point, for a key that
    points must share.
    """
    config = load_config(path, overrides)
    points = config.sweep.adapters
    short = short_names(list(dict.fromkeys(key for point in points for key in point)))
    known = flatten(config)
    found: list[Config] = []
    for values in points:
        name = name_of(values, short) or "base"
        for key in values:
            if key not in known:
                advice = advice_on_key(Config, key)
                raise ConfigError(f"sweep.adapters varies {key}, which is not a config key; {advice}")
            if not any(key == shared or (shared[-1] == "." and key.startswith(shared)) for shared in VARYING):
                varying = [f"{name}*" if name[-1] == "." else name for name in VARYING]
                raise ConfigError(
                    f"sweep.adapters varies {key}, but all points share it. Set it for all points, or "
                    "sweep over it with a job array (docs/launch.md). Points may differ in "
                    f"{listed(varying, 'and')}."
                )
        if name in (point.run.name for point in found):
            raise ConfigError(
                f"two points of sweep.adapters have the same values, and both the name {name}; remove one."
            )
        own = [as_override(key, value) for key, value in values.items()]
        place = [f"run.name={name}", f"run.dir={literal(Path(config.run.dir, name))}"]
        try:
            point = load_config(path, [*overrides, *own, *place, "sweep.adapters=[]"])
        except ConfigError as error:
            raise ConfigError(f"point {name} of sweep.adapters: {error}") from error
        found.append(replace(point, sweep=Sweep()))
    return found


def check_points(config: Config, points: Sequence[Config]) -> None:
    """Raise ConfigError for points that cannot run in one job."""
    kinds = {}
    for point in (config, *points):
        needs = set(algorithm_of(point).needs)
        if point is not config and (own := needs & OWN_MODELS):
            raise ConfigError(
                f"point {point.run.name} of sweep.adapters: algorithm={point.algorithm} trains a second "
                f"model ({', '.join(own)}); sweep over it with a job array."
            )
        if other := (run_models(point).keys() ^ run_models(config).keys()) - OWN_MODELS:
            raise ConfigError(
                f"point {point.run.name} of sweep.adapters: algorithm={point.algorithm} and the run's own "
                f"algorithm={config.algorithm} differ in models that all points share "
                f"({', '.join(sorted(other))}); use one of the two, or sweep with a job array."
            )
        kinds[frozenset(needs & {"samples", "responses", "pairs", "labels"})] = point
    if len(kinds) > 1:
        names = " and ".join(show(point.algorithm) for point in kinds.values())
        raise ConfigError(
            f"the points of sweep.adapters and the run's own `algorithm`, for which the data are read, must "
            f"learn from the same kind of data, but there are {names}; set algorithm to one of the points'."
        )
