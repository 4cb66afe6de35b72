"""Parser of the judge's answer, the default of `reward.judge.parser`."""

import re

from rl.rewards.answers import ascii_signs

_GRADE = re.compile(r"grade\s{0,3}[:=]\s{0,3}\*{0,2}\s{0,3}(\S{0,40})", re.IGNORECASE)
_NUMBER = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,6})?)(?:/10)?[.,;:!)\]}>*_'\"]*")


def grade(text: str) -> float:
    """Return the last `Grade: <number>` of the answer, from 0 to 10, scaled to 0 to 1.

    Raises ValueError if there is none, or if the last grade is not such a number (nan, 1e39, -3, 7/20, 11).
    """
    found = _GRADE.findall(ascii_signs(text))
    if not found:
        raise ValueError("the judge's answer has no 'Grade: <number>'")
    number = _NUMBER.fullmatch(found[-1])
    if number is None or float(number[1]) > 10:
        raise ValueError(f"the judge's grade is {found[-1]!r}, which is not a number from 0 to 10")
    return float(number[1]) / 10
