"""Call a reward function on samples, so that a bad sample or a bad function costs a score and never the run."""

import asyncio
import inspect
import logging
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

# Reward functions run checkers and generated code: exit() in there must not end the rank.
_CAUGHT = (Exception, SystemExit, asyncio.CancelledError)


_said: set[str] = set()
"""Tracebacks that this process has logged: a function that fails in every step need not say why in every step."""


class _RejectedResult(ValueError):
    """What a reward function returned is not a score."""


def score_samples(
    function: Callable[..., Any],
    samples: Sequence[Mapping[str, Any]],
    *,
    kwargs: Mapping[str, Any],
    failure_score: float,
) -> list[dict[str, float]]:
    """Call `function(**sample, **kwargs)` for each sample; one dict of finite floats per sample, in order.

    Each dict has `score` and `failed`, and the other numbers that the function returned (`acc`, ...). The function may
    return a number, or a dict with the key `score`, whose values that are not finite numbers are left out; it may be
    async, and its calls then run concurrently (from a thread without a running event loop).

    A call that raises or returns something else gives {"score": failure_score, "failed": 1.0} for its sample. The
    traceback of the first of them is logged as a warning, with their number; the same traceback once per process. Raises nothing.
    """
    outcomes = [_call(function, {**kwargs, **sample}) for sample in samples]
    if any(inspect.isawaitable(outcome) for outcome in outcomes):
        outcomes = asyncio.run(_await_all(outcomes))
    scores = []
    failures: list[BaseException] = []
    for outcome in outcomes:
        result = _to_result(outcome)
        if isinstance(result, BaseException):
            failures.append(result)
            scores.append({"score": float(failure_score), "failed": 1.0})
        else:
            scores.append({**result, "failed": 0.0})
    if failures:
        first = "".join(traceback.format_exception(failures[0])).rstrip()
        details = "the first failure:\n" + first if first not in _said else "the first failure was logged before"
        _said.add(first)
        log.warning(
            "the reward function failed on %d of %d samples, which get the score %g; %s",
            len(failures),
            len(samples),
            failure_score,
            details,
        )
    return scores


def _call(function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    """What the function returned, or what it raised."""
    try:
        return function(**keywords)
    except _CAUGHT as error:
        return error


async def _await_all(outcomes: Sequence[Any]) -> list[Any]:
    """`outcomes` with each awaitable in it replaced by what it returned or raised; all of them run concurrently."""

    async def settle(outcome: Awaitable[Any]) -> Any:
        try:
            return await outcome
        except _CAUGHT as error:
            return error

    async def keep(outcome: Any) -> Any:
        return outcome

    return await asyncio.gather(*(settle(o) if inspect.isawaitable(o) else keep(o) for o in outcomes))


def _to_result(outcome: Any) -> dict[str, float] | BaseException:
    """The finite numbers of what a reward function returned, `score` among them; or the reason why there are none."""
    if isinstance(outcome, BaseException):
        return outcome
    if not isinstance(outcome, Mapping):
        outcome = {"score": outcome}
    if "score" not in outcome:
        return _RejectedResult(f"the returned dict has no 'score', only {', '.join(map(repr, outcome)) or 'nothing'}")
    numbers_of = {key: _to_finite(value) for key, value in outcome.items() if isinstance(key, str)}
    if numbers_of["score"] is None:
        return _RejectedResult(
            f"the score must be a finite number, it is {type(outcome['score']).__name__} {outcome['score']!r:.80}"
        )
    return {key: value for key, value in numbers_of.items() if value is not None}


def _to_finite(value: Any) -> float | None:
    """A real number or bool as a float; None for NaN, infinities and everything that is not a number."""
    if not isinstance(value, (numbers.Real, np.bool_)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of float
        return None
    return number if math.isfinite(number) else None
