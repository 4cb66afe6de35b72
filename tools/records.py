"""The metrics of a run that are bitwise equal in every run of one seed and layout."""

import re
from pathlib import Path

from rl.run_directory.metric_log import FILE_NAME, read_records

MACHINE = re.compile(r"time$|(val-aux/)?(timing_|perf/)")
"""Metrics that depend on the clock, on the host, or on the engine's state before the step, for example
perf/."""


def comparable(run: Path) -> list[dict]:
    """Return the records of a run directory without the metrics in MACHINE."""
    records = read_records(run / FILE_NAME)
    return [{name: value for name, value in each.items() if not MACHINE.match(name)} for each in records]
