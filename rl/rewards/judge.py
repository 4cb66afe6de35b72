"""Parser of the judge's answer, the default of `reward.judge.parser`."""

import re

from rl.rewards.answers import ascii_signs

_GRADE = re.compile(r"grade\s{0,3}[:=]\s{0,3}\*{0,2}\s{0,3}(\S{0,40})", re.IGNORECASE)
_NUMBER = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,6})?)(?:/10)?[.,;:!)\]}>*_'\"]*")


def grade(text: str) -> float:
    """Return the number in the last `Grade: <number>` of the judge's answer, scaled from 0..10 to 0..1.

    Raises ValueError if there is no grade, or if the last grade is not a number from 0 to 10 (for example
    nan, 1e39, -3, 7/20 or 11).
    """
    found = _GRADE.findall(ascii_signs(text))
    if not found:
        raise ValueError("the judge's answer has no 'Grade: <number>'")
    number = _NUMBER.fullmatch(found[-1])
    if number is None or float(number[1]) > 10:
        raise ValueError(f"the judge's grade is {found[-1]!r}, which is not a number from 0 to 10")
    return float(number[1]) / 10
