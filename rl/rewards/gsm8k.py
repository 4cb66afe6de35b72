"""GSM8K: is the number that the response ends with the right one?

strict    the number right after the last `####` that has one, the form that the data set's own solutions use
flexible  the last number of the response, wherever it stands

Numbers may have a sign, a dollar sign, commas and decimals; a period at the end is not part of them. They are compared
as decimals, so that 18, 18.00 and $18 are one number, and 0.1 is not some other 0.1.
"""

import re
from collections import deque
from decimal import Decimal
from typing import Any

# No quantifier can match what follows it, so nothing is tried twice: linear time. The sign may stand before or after
# the dollar sign. A hyphen after a digit, a letter or a bracket is no sign: 10-5, x-5.
_NUMBER = (
    r"(?:(?<![\w)])(?P<sign>[-+]))?"
    r"(?:\\?\$ ?(?P<inner_sign>[-+])?)?"
    r"(?P<digits>[0-9][0-9,]*(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)
_FLEXIBLE = re.compile(_NUMBER)
_STRICT = re.compile(r"####[ \t]*" + _NUMBER)


def score(
    prompt: str, response: str, ground_truth: Any, *, method: str = "strict", **extra: Any
) -> dict[str, Any]:
    """`score` and `acc`: 1.0 if the response's number equals `ground_truth`, 0.0 otherwise, also if there is none.

    `pred` is that number in canonical form, for majority voting: $1,234.50 is 1234.5; empty if there is none.

    Raises ValueError for a `method` other than strict and flexible, or a ground truth that is not a number.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"reward.kwargs.method is {method!r}: choose strict or flexible.")
    truth = _FLEXIBLE.fullmatch(str(ground_truth).strip())
    if truth is None:
        raise ValueError(f"the ground truth of a GSM8K problem must be a number, it is {ground_truth!r}.")
    answer = last_number(response, strict=method == "strict")
    acc = float(answer is not None and answer == _to_decimal(truth))
    return {"score": acc, "acc": acc, "pred": "" if answer is None else _to_text(answer)}


def last_number(response: str, *, strict: bool) -> Decimal | None:
    """The last number of a response, or the last that follows `####`; None if there is none. Linear in the length."""
    last = deque((_STRICT if strict else _FLEXIBLE).finditer(response), maxlen=1)
    return _to_decimal(last[0]) if last else None


def _to_decimal(match: re.Match[str]) -> Decimal:
    number = Decimal(match["digits"].replace(",", ""))
    # Unary minus would round to 28 digits; copy_negate does not.
    return number.copy_negate() if "-" in (match["sign"], match["inner_sign"]) else number


def _to_text(number: Decimal) -> str:
    text = f"{number:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    # No answer needs 100 digits; what is longer is babble and would only fill the records.
    return "0" if text == "-0" else text[:100]
