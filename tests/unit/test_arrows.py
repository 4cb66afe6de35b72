"""Imports between the rooms of rl/ point in one direction: a room imports only rooms below it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS = (
    ("run", "dry_run"),
    ("algorithms",),
    ("phases",),
    ("engines", "checkpoint", "agents", "checks"),
    ("refit", "vision"),
    ("training", "rollout"),
    ("stopping", "faults"),
    ("run_directory", "runtime", "data", "rewards"),
    ("config",),
    ("models", "objectives", "numerics", "sandbox", "workers"),
)
"""Rooms of rl/ from the top floor to the ground."""


def rooms_imported_by(room: str) -> dict[str, set[str]]:
    """Rooms that the files of a room import, each with the importing files."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "rl" / room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [f"{node.module}.{name.name}" for name in node.names]
            elif isinstance(node, ast.Import):
                modules = [name.name for name in node.names]
            for module in modules:
                parts = module.split(".")
                if parts[0] == "rl" and len(parts) > 1 and parts[1] != room:
                    found.setdefault(parts[1], set()).add(str(file.relative_to(ROOT)))
    return found


def test_every_room_has_a_floor_and_no_module_is_loose():
    rl = ROOT / "rl"
    rooms = {path.name for path in rl.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == {room for floor in FLOORS for room in floor}
    assert [path.name for path in rl.glob("*.py")] == ["__init__.py"]


def test_imports_point_down():
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    upward = {
        f"{room} -> {other}": sorted(files)
        for room in floor_of
        for other, files in rooms_imported_by(room).items()
        if other in floor_of and floor_of[other] <= floor_of[room]
    }
    assert upward == {}, upward


def test_the_diagram_in_the_docs_has_these_floors():
    text = (ROOT / "docs" / "architecture.md").read_text()
    floors = text.partition("## Packages")[2].split("```")[1].strip().splitlines()
    assert tuple(tuple(floor.split()) for floor in floors) == FLOORS


OPTIONAL = (
    "rl.agents|phases.trajectories",
    r"rl.numerics|bitwise_numerics|\.delta_nets?\b",
    "rl.rollout.(adapters|routes|sampling_masks)",
    "trace_recorder|run.first_step",
    "rl.sandbox.(container|images)|shipped.container|integrations.harbor",
)
"""Modules of features, as regular expressions. Others import them inside of functions."""


@pytest.mark.parametrize("feature", OPTIONAL)
def test_a_run_imports_no_feature_that_it_does_not_use(feature):
    importing = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "rl").rglob("*.py")
        if not re.search(feature, ".".join(file.relative_to(ROOT).with_suffix("").parts))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and re.search(feature, ast.unparse(node))
    ]
    assert importing == []
