"""Durations in the forms of sbatch's --time."""

import re

FORM = re.compile(r"(?:(?P<days>\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def seconds_of(text: str) -> int:
    """Seconds of a duration as sbatch's --time takes it: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours, days-hours:minutes or days-hours:minutes:seconds. ValueError for anything else, and for 0."""
    match = FORM.fullmatch(text)
    if match is None:
        unit = re.fullmatch(r"(\d+) ?([dhm])[a-z]*", text.lower())
        ends = {"d": "-00:00:00", "h": ":00:00", "m": ":00"}
        example = f"{unit[1]}{ends[unit[2]]}" if unit else "hours:minutes:seconds as in 3:50:00"
        raise ValueError(f"{text!r} is not a duration; write {example}, or another form of sbatch's --time.")
    parts = [int(part) for part in match.groups()[1:] if part is not None]
    if match["days"] is None and len(parts) < 3:
        parts = [0, *parts]  # minutes, or minutes:seconds
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    total = ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise ValueError(f"{text!r} must be positive; omit it for no limit.")
    return total
