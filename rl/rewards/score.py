"""What a score is, and how the result of a reward function becomes one.

The workers of the pool run this module beside code that must not be trusted, so it imports next to nothing: a worker starts in
a tenth of a second, and what a reward function needs is the reward function's own affair.
"""

import math
import numbers
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREDICTION_CHARS = 1000
"""A longer prediction is cut: it is an extracted answer that votes are counted over, not a place for the response."""


@dataclass(frozen=True)
class Score:
    """What one sample got."""

    values: dict[str, float]
    """Finite numbers: `score`, whatever else the reward function returned (`acc`, ...), and from the pool `failed`, 0 or 1."""
    prediction: str | None = None
    """The extracted answer (`pred`), for majority voting."""


class RejectedResult(ValueError):
    """What a reward function returned is not a score."""


def to_score(result: Any) -> Score:
    """The Score in what a reward function returned: a number, or a dict with the key `score`.

    A dict's other finite numbers are kept, and the string under `pred`; the rest is left out. Names are kept if they can be
    printed, for they become names of metrics. Raises RejectedResult if there is no finite score.
    """
    if not isinstance(result, Mapping):
        result = {"score": result}
    if "score" not in result:
        raise RejectedResult(
            f"the returned dict has no 'score', only {', '.join(map(repr, result)) or 'nothing'}"
        )
    score = to_finite(result["score"])
    if score is None:
        found = result["score"]
        raise RejectedResult(f"the score must be a finite number, it is {type(found).__name__} {found!r:.80}")
    values = {"score": score}
    for name, value in result.items():
        number = to_finite(value)
        if number is not None and isinstance(name, str) and name.isprintable():
            values[name] = number
    prediction = result.get("pred")
    return Score(values, encodable(prediction[:PREDICTION_CHARS]) if isinstance(prediction, str) else None)


def to_finite(value: Any) -> float | None:
    """A real number or bool as a float; None for NaN, infinities and everything that is not a number."""
    if not isinstance(value, numbers.Real) and not _is_numpy_bool(value):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of float
        return None
    return number if math.isfinite(number) else None


def encodable(text: str) -> str:
    """`text` as it can be written to a file: half a surrogate pair becomes `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _is_numpy_bool(value: Any) -> bool:
    """numpy registers its numbers as numbers.Real, but not its bool. Who returns one has imported numpy; we need not."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.bool_)
