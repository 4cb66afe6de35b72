"""Which reward functions score a sample, as plain data: one for all data sources, or a weighted sum for some of them.

    reward:
      function: rl.rewards.gsm8k:score      # every data source that `sources` does not name
      kwargs: {method: flexible}
      sources:
        math:
          - {function: rl.rewards.math:score}
          - {function: my/own.py:brevity, weight: 0.1, kwargs: {limit: 2000}}

The scoring pool sends a `RewardPlan` to its workers, which load it into an `rl.rewards.mixture.Mixture`.
"""

import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.config.functions import FORM

SAMPLE_KEYS = ("prompt", "response", "ground_truth", "data_source", "extra_info")
"""Keywords of every call of a reward function; its `kwargs` in the config come on top."""

COMPONENT_KEYS = ("function", "weight", "kwargs")


@dataclass(frozen=True)
class Component:
    """One reward function of a weighted sum."""

    function: str
    """`package.module:name` or `path/to/file.py:name`."""
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    key: str = "reward"
    """Where the config has it, for error messages: `reward` or `reward.sources.<source>[i]`."""


@dataclass(frozen=True)
class RewardPlan:
    """The components of every data source. Plain data."""

    default: tuple[Component, ...]
    sources: Mapping[str, tuple[Component, ...]] = field(default_factory=dict)
    """data_source -> components, in place of `default`."""


def make_plan(function: str, kwargs: Mapping[str, Any], sources: Mapping[str, Any]) -> RewardPlan:
    """The plan of the config's reward.function, reward.kwargs and reward.sources. Raises ValueError as `check_sources` does."""
    return RewardPlan((Component(function, 1.0, dict(kwargs)),), check_sources(sources))


def check_sources(sources: Mapping[str, Any]) -> dict[str, tuple[Component, ...]]:
    """The components that the config's reward.sources gives to each data source; a single mapping stands for a list of one.

    Imports nothing. Raises ValueError for a malformed entry, naming its key.
    """
    if not isinstance(sources, Mapping):
        raise ValueError(f"reward.sources must map data sources to reward functions, it is {sources!r:.80}.")
    checked = {}
    for source, entries in sources.items():
        key = f"reward.sources.{source}"
        if not isinstance(source, str):
            raise ValueError(
                f"{key}: a data source is a string, this is {type(source).__name__} {source!r}; quote it."
            )
        if isinstance(entries, Mapping):
            entries = [entries]
        if not isinstance(entries, (list, tuple)) or not entries:
            raise ValueError(
                f"{key} must be a list of at least one {{function, weight, kwargs}}, it is {entries!r:.80}."
            )
        checked[source] = tuple(_to_component(f"{key}[{i}]", entry) for i, entry in enumerate(entries))
    return checked


def _to_component(key: str, entry: Any) -> Component:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{key} must be a mapping with the key function, it is {entry!r:.80}.")
    for unknown in [k for k in entry if k not in COMPONENT_KEYS]:
        raise ValueError(f"{key}.{unknown} is unknown; a component has the keys {', '.join(COMPONENT_KEYS)}.")
    if "function" not in entry:
        raise ValueError(
            f"{key}.function is missing; it names a reward function as package.module:name or path/to/file.py:name."
        )
    function, weight, kwargs = entry["function"], entry.get("weight", 1.0), entry.get("kwargs", {})
    if not isinstance(function, str) or not re.fullmatch(FORM, function):
        raise ValueError(
            f"{key}.function is {function!r:.80}, but must be package.module:name or path/to/file.py:name."
        )
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not math.isfinite(weight):
        raise ValueError(f"{key}.weight is {weight!r:.80}, but must be a finite number.")
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ValueError(f"{key}.kwargs is {kwargs!r:.80}, but must map keyword names to values.")
    for taken in sorted(set(kwargs) & set(SAMPLE_KEYS)):
        raise ValueError(f"{key}.kwargs.{taken} must not be set: each sample brings its own {taken}.")
    return Component(function, float(weight), dict(kwargs), key)
