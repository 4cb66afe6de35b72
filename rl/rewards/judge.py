"""Parser of the judge's answer, the default of `reward.judge.parser`."""

import re

_GRADE = re.compile(r"grade\s{0,3}[:=]\s{0,3}\*{0,2}\s{0,3}([0-9]{1,4}(?:\.[0-9]{1,6})?)", re.IGNORECASE)


def grade(text: str) -> float:
    """Return the last `Grade: <number>` of the answer, from 0 to 10, scaled to 0 to 1.

    Raises ValueError if there is none, or if it is above 10.
    """
    found = _GRADE.findall(text)
    if not found:
        raise ValueError("the judge's answer has no 'Grade: <number>'")
    if float(found[-1]) > 10:
        raise ValueError(f"the judge's grade is {found[-1]}, above 10")
    return float(found[-1]) / 10
