"""The score of a sample, and the conversion of a reward function's result into one.

It imports only the standard library, because every worker of the pool imports it. A worker then starts in 0.1
s.
"""

import json
import numbers
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rl.workers.messages import RejectedResult, encodable, shown

FEEDBACK_CHARS = 4000
"""Number of characters that are kept of a feedback."""
PREDICTION_CHARS = 1000
"""Number of characters that are kept of a prediction, which is a short extracted answer for majority
voting."""

LARGEST = 3.4028234663852886e38
"""Largest number of float32, the type of stored scores; a larger number would become infinite."""

INVALID = "[INVALID]"
"""Prediction that verl's reward functions return for a response without an answer."""


@dataclass(frozen=True)
class Score:
    """The score of one sample."""

    values: dict[str, float]
    """Finite numbers by name: `score`, the other numbers of the function (for example `acc`), and `failed` (0
    or 1), which the pool sets."""
    prediction: str | None = None
    """The extracted answer (`pred`), for majority voting; blank or INVALID if the response has none."""
    feedback: str | None = None
    """Text about the response (`feedback`), for a teacher's prompt (`teacher.template`)."""
    seal: int = field(default=-1, compare=False)
    """Hash of the calls and their answer (`sealed`). It is computed in the process that called the reward
    function. -1 if no function was called."""
    parts: tuple[float, ...] = field(default=(), compare=False)
    """The unweighted score of each function, in the order of the plan."""


def digest(calls: Iterable[tuple[str, float, Mapping[str, Any]]]) -> int:
    """Return a 32-bit hash of the calls that score a sample.

    calls: for each function its import path, its weight, and all of its arguments by name.
    """
    return zlib.crc32(json.dumps([*calls], default=repr).encode())


def sealed(score: Score, digest: int) -> Score:
    """Return the score with its `seal`, which also covers its parts and texts. For the hash, -0.0 equals 0.0.

    digest: result of `digest` for the calls that scored the sample.
    """
    covered = score.values["score"] + 0.0, *score.parts, score.prediction, score.feedback
    return replace(score, seal=zlib.crc32(repr(covered).encode(), digest))


def to_score(result: Any) -> Score:
    """Convert the result of a reward function, a number or a dict with the key `score`, to a Score.

    From a dict, other finite numbers are kept if their names are printable, because the names become names of
    metrics. The strings under `pred` and `feedback` are kept, too. The rest is dropped. For example,
    {"score": 1, "steps": 3, "log": "x"} keeps `score` and `steps`.

    Raises RejectedResult if there is no finite score. Also raises it for an `acc` that is not finite: if such
    values were dropped, the accuracy of some samples would look like the accuracy of all samples.
    """
    if not isinstance(result, Mapping):
        result = {"score": result}
    if "score" not in result:
        raise RejectedResult(
            f"the returned dict has no 'score', only {', '.join(map(repr, result)) or 'nothing'}; add it."
        )
    for name in ("score", "acc"):
        if name in result and to_finite(found := result[name]) is None:
            remedy = "leave it out for a sample without one" if name == "acc" else "return a number or a dict"
            raise RejectedResult(
                f"the {name} must be a finite number of float32, it is {shown(found)}; {remedy}."
            )
    values = {}
    for name, value in result.items():
        number = to_finite(value)
        if number is not None and isinstance(name, str) and name.isprintable():
            values[name] = number
    return Score(values, _text(result, "pred", PREDICTION_CHARS), _text(result, "feedback", FEEDBACK_CHARS))


def _text(result: Mapping, name: str, limit: int) -> str | None:
    text = result.get(name)
    return encodable(text[:limit]) if isinstance(text, str) else None


def to_finite(value: Any) -> float | None:
    """Convert a real number that float32 can hold, or a bool, to a float; return None for anything else."""
    if not isinstance(value, numbers.Real) and not _is_numpy_bool(value):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of float
        return None
    return number if abs(number) <= LARGEST else None


def _is_numpy_bool(value: Any) -> bool:
    # numpy registers its numbers as numbers.Real, but not its bool. If a function returns one, it has
    # imported numpy.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.bool_)
