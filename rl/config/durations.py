"""Durations in the forms of sbatch's --time."""

import re

FORM = re.compile(r"(?:(?P<days>\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def seconds_of(text: str) -> int:
    """Seconds of a duration as sbatch's --time takes it: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours, days-hours:minutes or days-hours:minutes:seconds. ValueError for anything else, and for 0."""
    match = FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a duration; write hours:minutes:seconds as in 3:50:00, or another form of "
            "sbatch's --time."
        )
    parts = [int(part) for part in match.groups()[1:] if part is not None]
    if match["days"] is None and len(parts) < 3:
        parts = [0, *parts]  # minutes, or minutes:seconds
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    total = ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise ValueError(f"{text!r} must be positive; omit it for no limit.")
    return total
