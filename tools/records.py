"""The metrics of a run that are bitwise equal in every run of one seed and layout."""

import json
import re
from pathlib import Path

MACHINE = re.compile(r"time$|(val-aux/)?(timing_|perf/)")
"""Metrics that depend on the clock, on the host, or on the state of the engine before the step."""


def comparable(run: Path) -> list[dict]:
    """Return the records of a run directory without the metrics in MACHINE."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not MACHINE.match(name)} for line in lines
    ]
