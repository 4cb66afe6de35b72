"""The records of a run."""

import json
from pathlib import Path

from rl.run_directory.named_metrics import is_documented
from rl.run_directory.rollout_files import read, stored_steps
from tools.records import MACHINE


def records(run: Path) -> list[dict]:
    """Return one record per step, in order; [] before there are any. docs/metrics.md has their metrics."""
    path = Path(run, "metrics.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    new = {name for record in found for name in record if name != "time" and not is_documented(name)}
    assert not new, f"{sorted(new)} are logged, but not documented; add them to rl/run_directory/metrics.yaml"
    return found


def comparable(run: Path) -> list[dict]:
    """Return the records without MACHINE: bitwise equal in two runs of one seed and layout."""
    return [
        {name: value for name, value in record.items() if not MACHINE.match(name)} for record in records(run)
    ]


def rollouts(run: Path) -> list[dict]:
    """Return the rows of all stored rollouts of a run directory, by step."""
    return [row for path in stored_steps(run).values() for row in read(path).to_pylist()]
