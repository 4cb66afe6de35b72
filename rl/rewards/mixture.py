"""Imports the reward functions of a `RewardPlan` and computes their weighted sums."""

import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rl.config.functions import companion
from rl.config.reward_sources import Component, RewardPlan
from rl.rewards.loading import load_reward_function
from rl.rewards.score import Score, digest, sealed, to_finite, to_score
from rl.workers.messages import RejectedResult, place_of


class Mixture:
    """The imported functions of a plan, by data source.

    Raises ValueError if a function is missing or does not accept the keywords of its calls.
    """

    def __init__(self, plan: RewardPlan):
        self._default = _load(plan.default)
        self._sources = {source: _load(components) for source, components in plan.sources.items()}

    @property
    def is_async(self) -> bool:
        """Whether one of the functions is declared `async def`. Other functions may return an awaitable,
        too."""
        scorers = [*self._default, *(scorer for source in self._sources.values() for scorer in source)]
        return any(inspect.iscoroutinefunction(scorer.function) for scorer in scorers)

    def score(self, sample: Mapping[str, Any]) -> Score | Awaitable[Score]:
        """Call the functions of the sample's data source. Return an awaitable if one of them returns one.

        The score is the sum over i of weight_i * score_i. For example, the weights 1 and 0.2 and the scores 1
        and 0.5 give 1.1. If the source has a single function, its other values keep their names. If it has
        several functions, the values of function i, including its unweighted score, are named
        `<short name>/<key>`. `acc` and the prediction come from the first function that returns one. Each
        function gets a copy of its arguments: samples of a group may share an `extra_info`, and a function
        may change it.

        Raises any exception of a function, and RejectedResult.

        If the response of a sample is None, `try_truth` of each function tries the ground truth instead.
        """
        scorers = self._of(sample.get("data_source"))
        given = [copy.deepcopy({**scorer.kwargs, **sample}) for scorer in scorers]
        key = digest((scorer.function_path, scorer.weight, own) for scorer, own in zip(scorers, given))
        if sample["response"] is None:
            for scorer in scorers:
                if scorer.try_truth is not None:
                    scorer.try_truth(sample["ground_truth"], **scorer.kwargs)
            return sealed(Score({"score": 0.0}), key)
        results = [scorer.function(**own) for scorer, own in zip(scorers, given)]
        if any(inspect.isawaitable(result) for result in results):
            return _settle(scorers, results, key)
        return _combine(scorers, results, key)

    def check_truth(self, ground_truth: Any, data_source: str) -> None:
        """Raise ValueError if `check_truth` of one of the functions rejects the ground truth."""
        for scorer in self._of(data_source):
            if scorer.check_truth is not None:
                read_truth(scorer.check_truth, ground_truth, scorer.name, **scorer.kwargs)

    def tries_truths(self, data_source: str) -> bool:
        """Return whether one of the functions of this source has a `try_truth`."""
        return any(scorer.try_truth is not None for scorer in self._of(data_source))

    def _of(self, data_source: Any) -> "list[_Scorer]":
        return self._sources.get(data_source, self._default)


def read_truth(check: Callable[..., Any], ground_truth: Any, name: str, **kwargs: Any) -> None:
    """Raise ValueError if `check` raises for a ground truth. name: the function of `check`, for the
    message."""
    try:
        check(ground_truth, **kwargs)
    except ValueError:
        raise
    except Exception as error:  # a form that check_truth does not expect
        raise ValueError(
            f"reward_model.ground_truth={ground_truth!r:.200} cannot be read by {name} "
            f"({type(error).__name__}: {error}); write it in a form that it reads."
        ) from error


class _Scorer(NamedTuple):
    """A component of the plan with its function imported."""

    name: str
    function_path: str
    """`package.module:name` or `path/to/file.py:name`."""
    weight: float
    kwargs: Mapping[str, Any]
    function: Callable[..., Any]
    check_truth: Callable[..., Any] | None
    """Raises ValueError, within microseconds, for a ground truth that no response could match."""
    try_truth: Callable[..., Any] | None
    """Runs a ground truth, for example its tests, and raises ValueError if it grades wrongly. May take
    seconds."""


def _load(components: Sequence[Component]) -> list[_Scorer]:
    return [
        _Scorer(
            name,
            c.function,
            c.weight,
            c.kwargs,
            load_reward_function(c.function, kwargs=c.kwargs, key=c.key),
            companion(c.function, "check_truth"),
            companion(c.function, "try_truth"),
        )
        for c, name in zip(components, short_names(components))
    ]


def short_names(components: Sequence[Component]) -> list[str]:
    """Return a unique name for each component, for example math and math_2.

    It is the last part of its module's name, or the name of its file without the extension.
    """
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


def _graded(scorer: _Scorer, result: Any) -> Score:
    """Return the score that a function returned. Raises RejectedResult with the function's place."""
    try:
        return to_score(result)
    except RejectedResult as error:
        raise RejectedResult(f"reward function {place_of(scorer.function)}: {error}") from None


async def _settle(scorers: Sequence[_Scorer], results: Sequence[Any], key: int) -> Score:
    """Await the awaitables among the results concurrently and return the combined score."""
    import asyncio  # imported here because it doubles the time that a worker needs to start

    async def settled(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    if len(results) == 1:
        return _combine(scorers, [await results[0]], key)
    # A task group is used because, unlike gather, it leaves no call running after another call has failed.
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(settled(result)) for result in results]
    return _combine(scorers, [task.result() for task in tasks], key)


def _combine(scorers: Sequence[_Scorer], results: Sequence[Any], key: int) -> Score:
    """Return the weighted sum of the functions' scores, sealed with `key`, the digest of their sample."""
    scores = [_graded(scorer, result) for scorer, result in zip(scorers, results)]
    total = sum(scorer.weight * score.values["score"] for scorer, score in zip(scorers, scores))
    if to_finite(total) is None:
        raise RejectedResult(f"the weighted sum of the scores is {total}")
    parts = tuple(score.values["score"] for score in scores)
    if len(scores) == 1:
        score = Score({**scores[0].values, "score": total}, scores[0].prediction, scores[0].feedback)
        return sealed(replace(score, parts=parts), key)
    values = {"score": total}
    for score in scores:
        if "acc" in score.values:
            values.setdefault("acc", score.values["acc"])
    for scorer, score in zip(scorers, scores):
        values |= {f"{scorer.name}/{name}": value for name, value in score.values.items()}
    prediction = next((score.prediction for score in scores if score.prediction is not None), None)
    feedback = "\n".join(score.feedback for score in scores if score.feedback is not None)
    return sealed(Score(values, prediction, feedback or None, parts=parts), key)
