"""The reward functions of a `RewardPlan`, imported, and their weighted sums."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.config.reward_sources import Component, RewardPlan
from rl.rewards.loading import load_reward_function
from rl.rewards.score import RejectedResult, Score, to_score


class Mixture:
    """A plan with its functions imported. Raises ValueError if one is missing or does not take the keywords of its calls."""

    def __init__(self, plan: RewardPlan):
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
