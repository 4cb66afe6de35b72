"""Ranges of numeric keys: declared in the type of a field, `tp: Annotated[int, AT_LEAST_ONE] = 1`."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Range:
    words: str
    """The range in words, for "must be ..."."""
    accepts: Callable[[Any], bool]
    """Whether a value is in the range; False for nan."""


def is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


AT_LEAST_ONE = Range("at least 1", lambda v: v >= 1)
AT_LEAST_TWO = Range("at least 2", lambda v: v >= 2)
NOT_NEGATIVE = Range("0 or more and finite", lambda v: 0 <= v < math.inf)
ZERO = Range("0", lambda v: v == 0)
POSITIVE = Range("greater than 0 and finite", lambda v: 0 < v < math.inf)
TEMPERATURE = Range("greater than 0 and at most 2", lambda v: 0 < v <= 2)
NOT_ABOVE_TWO = Range("from 0 to 2", lambda v: 0 <= v <= 2)
PROBABILITY = Range("greater than 0 and at most 1", lambda v: 0 < v <= 1)
FRACTION = Range("from 0 to 1", lambda v: 0 <= v <= 1)
SIGNED_FRACTION = Range("from -1 to 1", lambda v: -1 <= v <= 1)
BELOW_ONE = Range("at least 0 and less than 1", lambda v: 0 <= v < 1)
BELOW_HALF = Range("at least 0 and less than 0.5", lambda v: 0 <= v < 0.5)
FINITE = Range("finite", math.isfinite)
FINITE_OR_LIST = Range(
    "a finite number, or a list of finite numbers",
    lambda v: all(map(is_finite, v)) if isinstance(v, list) else is_finite(v),
)
ONE_TO_TWO = Range("from 1 to 2", lambda v: 1 <= v <= 2)
ONE_OR_MORE = Range("1 or more and finite", lambda v: 1 <= v < math.inf)
PORT = Range("from 0 (none) to 65535", lambda v: 0 <= v <= 65535)
ZERO_OR_ABOVE_ONE = Range("0 (off) or greater than 1 and finite", lambda v: v == 0 or 1 < v < math.inf)


@functools.cache
def ranges_of(cls: type, prefix: str = "") -> dict[str, Range]:
    """Return dotted key -> range of every field of a tree of dataclasses that declares one, in order."""
    found: dict[str, Range] = {}
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        hint = hints[field.name]
        if is_dataclass(hint):
            found |= ranges_of(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        for extra in getattr(hint, "__metadata__", ()):
            found[prefix + field.name] = extra
    return found
