"""Which reward functions score a sample: one for all data sources, or a weighted sum for some of them.

    reward:
      function: rl.rewards.gsm8k:score      # every data source that `sources` does not name
      kwargs: {method: flexible}
      sources:
        math:
          - {function: rl.rewards.math:score}
          - {function: my/own.py:brevity, weight: 0.1, kwargs: {limit: 2000}}

A `Plan` says so in plain data, which the pool sends to its workers; there it is loaded into a `Mixture`.
"""

import inspect
import math
import numbers
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.config.functions import FORM
from rl.rewards.loading import SAMPLE_KEYS, load_reward_function
from rl.rewards.score import RejectedResult, Score, to_score

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
class Plan:
    """The components of every data source. Plain data."""

    default: tuple[Component, ...]
    sources: Mapping[str, tuple[Component, ...]] = field(default_factory=dict)
    """data_source -> components, in place of `default`."""


def make_plan(function: str, kwargs: Mapping[str, Any], sources: Mapping[str, Any]) -> Plan:
    """The plan of the config's reward.function, reward.kwargs and reward.sources. Raises ValueError as `check_sources` does."""
    return Plan((Component(function, 1.0, dict(kwargs)),), check_sources(sources))


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


class Mixture:
    """A plan with its functions imported. Raises ValueError if one is missing or does not take the keywords of its calls."""

    def __init__(self, plan: Plan):
        self._default = [_Scorer(c, name) for c, name in zip(plan.default, short_names(plan.default))]
        self._sources = {
            source: [_Scorer(c, name) for c, name in zip(components, short_names(components))]
            for source, components in plan.sources.items()
        }

    @property
    def is_async(self) -> bool:
        """Whether a function is declared `async def`. Others may still return something to await."""
        scorers = [*self._default, *(scorer for source in self._sources.values() for scorer in source)]
        return any(inspect.iscoroutinefunction(scorer.function) for scorer in scorers)

    def score(self, sample: Mapping[str, Any]) -> Score | Awaitable[Score]:
        """Call the functions of the sample's data source. With an async one among them, something to await.

        score = sum over i of weight_i * score_i. A single function's other values are kept under their names. Of several,
        those of function i are kept as `<short name>/<key>`, its unweighted score too, and `acc` and the prediction come from
        the first function that has one. Raises whatever a function raises, and RejectedResult.
        """
        scorers = self._sources.get(sample.get("data_source"), self._default)
        results = [scorer.function(**{**scorer.kwargs, **sample}) for scorer in scorers]
        if any(inspect.isawaitable(result) for result in results):
            return _settle(scorers, results)
        return _combine(scorers, [to_score(result) for result in results])


class _Scorer:
    """A component and its function."""

    def __init__(self, component: Component, name: str):
        self.name, self.weight, self.kwargs = name, component.weight, component.kwargs
        self.function: Callable[..., Any] = load_reward_function(
            component.function, kwargs=component.kwargs, key=component.key
        )


def short_names(components: Sequence[Component]) -> list[str]:
    """A name for each of a source's components: its module's last part or its file's stem, numbered where it is taken."""
    names: list[str] = []
    for component in components:
        location = component.function.rpartition(":")[0]
        stem = Path(location).stem if location.endswith(".py") else location.rpartition(".")[2]
        name, number = stem, 1
        while name in names:
            number += 1
            name = f"{stem}_{number}"
        names.append(name)
    return names


async def _settle(scorers: Sequence[_Scorer], results: Sequence[Any]) -> Score:
    """The combined score once every awaitable among the results is there; they run concurrently."""
    import asyncio  # here, for a quick start of the workers; see worker.py

    async def settled(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    if len(results) == 1:
        return _combine(scorers, [to_score(await results[0])])
    async with (
        asyncio.TaskGroup() as group
    ):  # unlike gather, it leaves no call running when another has failed
        tasks = [group.create_task(settled(result)) for result in results]
    return _combine(scorers, [to_score(task.result()) for task in tasks])


def _combine(scorers: Sequence[_Scorer], scores: Sequence[Score]) -> Score:
    total = sum(scorer.weight * score.values["score"] for scorer, score in zip(scorers, scores))
    if not math.isfinite(total):
        raise RejectedResult(f"the weighted sum of the scores is {total}")
    if len(scores) == 1:
        return Score({**scores[0].values, "score": total}, scores[0].prediction)
    values = {"score": total}
    for score in scores:
        if "acc" in score.values:
            values.setdefault("acc", score.values["acc"])
    for scorer, score in zip(scorers, scores):
        values |= {f"{scorer.name}/{name}": value for name, value in score.values.items()}
    return Score(values, next((score.prediction for score in scores if score.prediction is not None), None))
