"""Puzzles of reasoning-gym (github.com/open-thought/reasoning-gym): a data source and its scorer.

`lockstep data tasks reasoning-gym` writes a row per puzzle; its `ground_truth` is a puzzle's `pack`.

    reward:
      function: rl.features.agents.integrations.reasoning_gym:score    # one answer per prompt

    agents:
      environment: rl.features.agents.integrations.reasoning_gym:Puzzle  # several attempts
      kwargs: {attempts: 3}
"""

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from rl.features.agents.integrations.imports import require

reasoning_gym = require("reasoning_gym", extra="reasoning-gym")

INSTRUCTION = "Give the final answer between <answer> and </answer>."


def puzzles(task: str, config: dict[str, Any], seed: int, size: int) -> Iterator[tuple[str, str]]:
    """Yield question and `pack` of each puzzle. Raises ValueError for an unknown task or option."""
    for entry in reasoning_gym.create_dataset(task, seed=seed, size=size, **config):
        yield entry["question"], pack(task, config, entry)


def pack(task: str, config: dict[str, Any], entry: dict[str, Any]) -> str:
    """Return a puzzle as a Python literal.

    The entry is stored instead of its seed, because some generators depend on the order of a set of strings,
    which differs between processes. JSON would turn tuples into lists, but scorers compare with tuples.
    """
    packed = repr(_plain({"task": task, "config": config, "entry": entry}))
    if ast.literal_eval(packed)["entry"] != entry:
        raise ValueError(f"the puzzles of task={task} cannot be stored as text; leave out this task.")
    return packed


def _plain(value: Any) -> Any:
    """Return a value with Python's scalars in place of numpy's. For example, np.int64(3), which some
    generators leave in an entry, becomes 3."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def score(prompt: str, response: str, ground_truth: str, **extra: Any) -> dict[str, float | str]:
    """Return the scorer's value of the last <answer> of a response, and `acc`: 1.0 if the value is 1, else
    0.0.

    Raises ValueError for a ground truth that is not a `pack`.
    """
    answer = reasoning_gym.utils.extract_answer(response)
    puzzle = check_truth(ground_truth)
    scorer = _scorer(puzzle["task"], repr(puzzle["config"]))
    value = float(scorer.score_answer(answer, puzzle["entry"]))
    return {"score": value, "acc": float(value == 1.0), "pred": answer or ""}


def check_truth(ground_truth: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the puzzle of a `pack`. Raises ValueError for anything else."""
    try:
        puzzle = ast.literal_eval(ground_truth)
        puzzle["task"], puzzle["config"], puzzle["entry"]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"reward_model.ground_truth={ground_truth!r:.200} must be a puzzle; write the rows by "
            "`lockstep data tasks reasoning-gym`."
        ) from error
    return puzzle


@lru_cache
def _scorer(task: str, config: str) -> Any:
    return reasoning_gym.create_dataset(task, size=1, seed=0, **ast.literal_eval(config))


class Puzzle:
    """A puzzle with several attempts; the last one counts."""

    def __init__(self, attempts: int = 1) -> None:
        self._attempts = attempts

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self._row, self._score, self._turns = row, 0.0, 0
        return row["messages"]

    def step(self, text: str) -> tuple[str, float, bool]:
        self._turns += 1
        self._score = float(score("", text, self._row["ground_truth"])["score"])
        done = self._score == 1.0 or self._turns >= self._attempts
        return "That is not correct. Try again.", 0.0, done

    def score(self) -> dict[str, float]:
        return {"score": self._score, "acc": float(self._score == 1.0), "attempts": float(self._turns)}
