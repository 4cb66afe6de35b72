"""Results of a stage: rows with a verdict, written to a file after each row.

A stage that crashes or exceeds its time limit therefore keeps its earlier results.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERDICTS = PASS, FAIL, SKIP, NOTE = "pass", "fail", "skip", "note"
"""Verdicts. A skip names what is missing. A note is a value without a limit."""


@dataclass(frozen=True)
class StageResult:
    """One result of a stage."""

    name: str
    verdict: str
    value: str = ""
    limit: str = ""
    text: str = ""


@dataclass
class Findings:
    """The rows of one stage. Only rank 0 writes them."""

    path: Path
    writes: bool = True
    rows: list[StageResult] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    """Values by name, for later stages and for comparisons between machines."""
    timeline: dict[str, float] = field(default_factory=dict)
    """Seconds by part of a training step."""

    def at_most(self, name: str, value: float, limit: float, *, unit: str = "", text: str = "") -> None:
        """Add a value that passes if it is at most `limit`; NaN fails."""
        self._bound(name, value, value <= limit, f"at most {shown(limit, unit)}", unit, text)

    def at_least(self, name: str, value: float, limit: float, *, unit: str = "", text: str = "") -> None:
        """Add a value that passes if it is at least `limit`; NaN fails."""
        self._bound(name, value, value >= limit, f"at least {shown(limit, unit)}", unit, text)

    def _bound(self, name: str, value: float, passed: bool, limit: str, unit: str, text: str) -> None:
        verdict = PASS if passed else FAIL
        self._add(StageResult(name, verdict, shown(value, unit), limit, text), value)

    def target(self, name: str, value: float, least: float, *, applies: bool, unit: str = "") -> None:
        """Add a value with a target if it `applies` (on a GPU), else a note."""
        if applies:
            return self.at_least(name, value, least, unit=unit)
        self.note(name, value, unit=unit, text=f"on a GPU at least {shown(least, unit)}")

    def note(self, name: str, value: float, *, unit: str = "", text: str = "") -> None:
        self._add(StageResult(name, NOTE, shown(value, unit), text=text), value)

    def remark(self, name: str, text: str) -> None:
        self._add(StageResult(name, NOTE, text=text))

    def check(self, name: str, passed: bool, text: str = "", *, value: str = "") -> None:
        self._add(StageResult(name, PASS if passed else FAIL, value, text=text))

    def skip(self, name: str, text: str) -> None:
        self._add(StageResult(name, SKIP, text=text))

    def _add(self, row: StageResult, value: float | None = None) -> None:
        self.rows.append(row)
        if value is not None:
            self.figures[row.name] = value
        self.write()

    def write(self) -> None:
        """Write the file, atomically."""
        if self.writes:
            content = dict(rows=list(map(asdict, self.rows)), figures=self.figures, timeline=self.timeline)
            write_results(self.path, content)


def write_results(file: Path, content: Any) -> None:
    """Write JSON atomically, so that the end of the process leaves the old file or the new one."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(file)


def read_results(file: Path) -> dict:
    """Return a stage's results; {} if there are none. Raises ValueError if the file is damaged."""
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    if not (
        isinstance(found, dict) and isinstance(found.get("rows"), list) and all(map(_is_row, found["rows"]))
    ):
        raise ValueError(f"{file} has no rows")
    if "verdict" in found and not (found["verdict"] in VERDICTS and found.keys() >= {"name", "text", "mode"}):
        raise ValueError(f"{file} has no mode or another verdict")
    return found


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and value.get("verdict") in VERDICTS


def shown(value: float, unit: str = "") -> str:
    """Return a number with four significant digits, and its unit."""
    whole = abs(value) < 1e15 and value == round(value)
    text = f"{value:.0f}" if whole or 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{text} {unit}".strip()
