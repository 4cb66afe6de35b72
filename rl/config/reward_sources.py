"""Reward functions per data source, as plain data: one for all sources, or a weighted sum for some.

    reward:
      function: rl.rewards.gsm8k:score      # every data source that `sources` does not name
      kwargs: {method: flexible}
      sources:
        math:
          - {function: rl.rewards.math:score}
          - {function: my/own.py:brevity, weight: 0.1, kwargs: {limit: 2000}}

The scoring pool sends a `RewardPlan` to its workers, which import its functions
(`rl.rewards.mixture.Mixture`).
"""

import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.config.functions import FORM

SAMPLE_KEYS = ("prompt", "response", "ground_truth", "data_source", "extra_info")
"""Keywords of every call of a reward function, besides its `kwargs` in the config."""

COMPONENT_KEYS = ("function", "weight", "kwargs")


@dataclass(frozen=True)
class Component:
    """One reward function of a weighted sum."""

    function: str
    """`package.module:name` or `path/to/file.py:name`."""
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    key: str = "reward"
    """Key in the config, for error messages: `reward` or `reward.sources.<source>[i]`."""


@dataclass(frozen=True)
class RewardPlan:
    """The components of every data source."""

    default: tuple[Component, ...]
    sources: Mapping[str, tuple[Component, ...]] = field(default_factory=dict)
    """data_source -> components that replace `default`."""

    @property
    def name(self) -> str:
        """The reward function as its key=value, if it is one for all sources, for messages."""
        return "the reward function" if self.sources else f"reward.function={self.default[0].function}"


def make_plan(function: str, kwargs: Mapping[str, Any], sources: Mapping[str, Any]) -> RewardPlan:
    """Return the plan of reward.function, reward.kwargs and reward.sources. Raises as `check_sources`."""
    return RewardPlan((Component(function, 1.0, dict(kwargs)),), check_sources(sources))


def check_sources(sources: Mapping[str, Any]) -> dict[str, tuple[Component, ...]]:
    """Return the components of each data source in reward.sources; one mapping stands for a list of one.

    Imports no reward function. Raises ValueError for a malformed entry, naming its key.
    """
    if not isinstance(sources, Mapping):
        raise ValueError(f"reward.sources={sources!r:.80} must map data sources to reward functions.")
    checked = {}
    for source, entries in sources.items():
        key = f"reward.sources.{source}"
        if not isinstance(source, str):
            raise ValueError(f"{key}: a data source must be a string, not {type(source).__name__}; quote it.")
        if isinstance(entries, Mapping):
            entries = [entries]
        if not isinstance(entries, (list, tuple)) or not entries:
            raise ValueError(f"{key}={entries!r:.80} must list at least one {{function, weight, kwargs}}.")
        checked[source] = tuple(_to_component(f"{key}[{i}]", entry) for i, entry in enumerate(entries))
    return checked


def _to_component(key: str, entry: Any) -> Component:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{key}={entry!r:.80} must be a mapping with the key function.")
    for unknown in [k for k in entry if k not in COMPONENT_KEYS]:
        raise ValueError(f"{key}.{unknown} is unknown; a component has the keys {', '.join(COMPONENT_KEYS)}.")
    if "function" not in entry:
        raise ValueError(f"{key}.function is missing; set it to package.module:name or path/to/file.py:name.")
    function, weight, kwargs = entry["function"], entry.get("weight", 1.0), entry.get("kwargs", {})
    if not isinstance(function, str) or not re.fullmatch(FORM, function):
        raise ValueError(
            f"{key}.function={function!r:.80} must be package.module:name or path/to/file.py:name."
        )
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not math.isfinite(weight):
        raise ValueError(f"{key}.weight={weight!r:.80} must be a finite number.")
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ValueError(f"{key}.kwargs={kwargs!r:.80} must map keyword names to values.")
    for taken in sorted(set(kwargs) & set(SAMPLE_KEYS)):
        raise ValueError(f"{key}.kwargs.{taken} must not be set: each sample provides its own {taken}.")
    return Component(function, float(weight), dict(kwargs), key)
