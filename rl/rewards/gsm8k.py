"""GSM8K reward: compare the final number of the response with the ground truth.

strict    the number directly after the last `####` that has one, as in the data set's own solutions
flexible  the last number anywhere in the response

A number may have a sign (also U+2212), a dollar sign, commas between thousands, and decimals. A period behind
it is not part of it. Numbers are compared as decimals, without binary rounding: for example, 18, 18.00 and
$18 are equal. If a number continues in another form, as in 1,5 or 1/2 or 6.6e-34, it does not count as a
number.
"""

import re
from collections import deque
from decimal import Decimal
from typing import Any

from rl.rewards.answers import ascii_signs, single

# Matching takes linear time: no quantifier can match what follows it, so it never backtracks. The sign may
# stand before or after the dollar sign. A hyphen after a digit, a letter or a bracket is not a sign: 10-5,
# x-5.
_NUMBER = (
    r"(?:(?<![\w)])(?P<sign>[-+]))?"
    r"(?:\\?\$ ?(?P<inner_sign>[-+])?)?"
    r"(?P<digits>[0-9][0-9,]*(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)
# Text directly behind a number that changes the value of the number.
_REST = r"(?P<rest>(?:(?:[/^:*]|[eE][-+]?|\.{0})[0-9][0-9.,]*)*)"
_FLEXIBLE = re.compile(_NUMBER + _REST.format(""))
_STRICT = re.compile(r"####[ \t]*" + _NUMBER + _REST.format("|-"))
_THOUSANDS = re.compile(r"[0-9]+|[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}")
"""Matches the digits before the decimal point. Groups of two digits are the Indian way of writing."""


def score(
    prompt: str, response: str, ground_truth: Any, *, method: str = "strict", **extra: Any
) -> dict[str, Any]:
    """Return `score` and `acc`: 1.0 if the response's number equals `ground_truth`, else 0.0.

    `pred` is the number of the response in canonical form, for majority voting: $1,234.50 becomes 1234.5. It
    is empty if the response has no number.

    Raises ValueError for a `method` other than strict and flexible, or a ground truth that is not a number.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"reward.kwargs.method={method!r}: choose strict or flexible.")
    truth = check_truth(ground_truth)
    answer = last_number(response, strict=method == "strict")
    acc = float(answer == truth)
    return {"score": acc, "acc": acc, "pred": "" if answer is None else _to_text(answer)}


def check_truth(ground_truth: Any, **kwargs: Any) -> Decimal:
    """Return the number of a ground truth. Raises ValueError if it is not a number."""
    match = _FLEXIBLE.fullmatch(ascii_signs(single(ground_truth)).strip())
    truth = _to_decimal(match) if match else None
    if truth is None:
        raise ValueError(
            f"reward_model.ground_truth={ground_truth!r:.200} must be a number for the GSM8K reward, such as "
            "1,234.5; use another reward function for other answers."
        )
    return truth


def last_number(response: str, *, strict: bool) -> Decimal | None:
    """Return the last number of a response, None if it has none. Takes linear time.

    strict: whether only numbers directly behind `####` count.
    """
    last = deque((_STRICT if strict else _FLEXIBLE).finditer(ascii_signs(response)), maxlen=1)
    return _to_decimal(last[0]) if last else None


def _to_decimal(match: re.Match[str]) -> Decimal | None:
    digits = match["digits"].rstrip(",")
    whole = digits.partition(".")[0]
    if match["rest"] or (whole and not _THOUSANDS.fullmatch(whole)):
        return None
    number = Decimal(digits.replace(",", ""))
    # Unary minus would round to 28 digits.
    return number.copy_negate() if "-" in (match["sign"], match["inner_sign"]) else number


def _to_text(number: Decimal) -> str:
    text = f"{number:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    # No answer needs 100 digits, and longer answers would only inflate the stored records.
    return "0" if text == "-0" else text[:100]
