"""What a run has logged."""

import json
import re
from pathlib import Path

MACHINE = re.compile(r"time$|timing_s/|perf/")
"""Metrics that depend on the clock, the host, or on where a run was interrupted: a resumed run refits once more."""


def records(run: Path) -> list[dict]:
    """One per step, in order; [] before there are any."""
    path = Path(run, "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def comparable(run: Path) -> list[dict]:
    """What must be the same to the bit in two runs of one seed and layout."""
    return [
        {name: value for name, value in record.items() if not MACHINE.match(name)} for record in records(run)
    ]
