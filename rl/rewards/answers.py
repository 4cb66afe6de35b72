"""Reads ground truths and answers in the same way for every reward function.

A ground truth reaches a reward function in the form in which the file holds it: a text, a number, a list of
accepted answers, SQuAD's mapping {"text": [...], "answer_start": [...]}, or the JSON text of one of these.
`accepted` returns the accepted answers as texts. It refuses an unknown form. Otherwise wrong responses, or no
response at all, would be rewarded.
"""

import ast
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

KEYS = ("target", "answers", "answer", "text", "value", "aliases")
"""Keys under which a mapping may hold its answers, for example in Search-R1, SQuAD and TriviaQA."""
SHOWN_CHARS = 200
"""Maximum number of characters of a ground truth that an error message shows."""

_ASCII = {
    0x2212: "-",
    0x3000: " ",
    0x3002: ".",
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
}
# The beginning of a list, mapping or tuple of texts. Other brackets may be an answer, such as [1, 2] or {1,
# 2}.
_CONTAINER = re.compile(r"""\s*(?:[\[(]\s*)*(?:[\[{]\s*['"]|\(\s*(['"])[^'"]*\1\s*,)""")


def accepted(ground_truth: Any) -> list[str]:
    """Return the accepted answers of a ground truth. There is at least one, and none of them is blank.

    Whole floats become integers: for example, 72.0 becomes "72". The reason is that a column of integers with
    nulls is read as floats. Nulls in lists are left out. A text is one answer, unless it spells a list or a
    mapping of texts. Raises ValueError for anything else.
    """
    try:
        answers = _read(ground_truth)
    except ValueError as error:
        raise refusal(ground_truth, str(error)) from error
    if not answers:
        raise refusal(ground_truth, "it holds no answer")
    return answers


def single(ground_truth: Any) -> str:
    """Return the only answer of a ground truth. Raises ValueError if it has no answer or different
    answers."""
    answers = list(dict.fromkeys(accepted(ground_truth)))
    if len(answers) > 1:
        raise refusal(ground_truth, f"it holds {len(answers)} answers, this reward function reads one")
    return answers[0]


def refusal(ground_truth: Any, reason: str) -> ValueError:
    """Return the error for a ground truth against which no response can be graded."""
    shown = " is missing" if ground_truth is None else f"={ground_truth!r:.{SHOWN_CHARS}}"
    return ValueError(
        f"reward_model.ground_truth{shown}: {reason}; write the answer as text, or several as a list of "
        "texts if the reward function accepts several."
    )


def decoded(value: Any) -> Any:
    """Return a value in plain types of Python. Arrays, and texts that spell a list or mapping, are converted.

    Raises ValueError for a text that begins like a list or mapping but is neither JSON nor Python.
    """
    value = plain(value)
    if not isinstance(value, str) or not _CONTAINER.match(value):
        return value
    found = container(value)
    if found is None:
        raise ValueError("it looks like a list or mapping, but is neither JSON nor a Python literal")
    return found


def container(text: str) -> list | dict | None:
    """Return the list or mapping that a text spells in JSON or as Python prints it, otherwise None."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        try:
            found = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None
        # numpy prints an array without commas: ['a' 'b'], which Python would read as ['ab'].
        if not isinstance(found, tuple) and repr(found) != text.strip():
            return None
        found = list(found) if isinstance(found, tuple) else found
    return found if isinstance(found, (list, dict)) else None


def plain(value: Any) -> Any:
    """Convert arrays and numbers of numpy, which are read from Parquet files, to lists and numbers of
    Python."""
    numpy = sys.modules.get("numpy")  # if the value has a type of numpy, numpy is imported already
    return (
        value.tolist() if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) else value
    )


def ascii_signs(text: str) -> str:
    """Replace typographic signs in a text by ASCII.

    U+2212, the minus sign of typeset mathematics, becomes `-`. The fullwidth signs of Chinese and Japanese
    text become their ASCII counterparts: for example, U+FF11 becomes `1`.
    """
    return text.translate(_ASCII)


def _read(value: Any) -> list[str]:
    value = decoded(value)
    if isinstance(value, Mapping):
        found = [value[key] for key in KEYS if value.get(key) is not None]
        if not found:
            raise ValueError(
                f"its keys {', '.join(map(repr, value)) or '(none)'} are none of {', '.join(KEYS)}"
            )
        return [answer for each in found for answer in _read(each)]
    if isinstance(value, (list, tuple)):
        return [answer for each in value for answer in _read(each)]
    if isinstance(value, bytes):
        raise ValueError("bytes are not text")
    if value is None or value != value:  # NaN, which is pandas' null in a column of numbers
        return []
    if not isinstance(value, (str, bool, int)) and _is_whole(value):
        value = int(value)
    return [text] if (text := str(value)).strip() else []


def _is_whole(value: Any) -> bool:
    try:
        return math.isfinite(value) and value == int(value)
    except (TypeError, ValueError, OverflowError):
        return False
