"""Imports between the rooms of rl/ point in one direction: a room imports only rooms on floors below its own,
as docs/architecture.md shows them."""

import ast
import re
from pathlib import Path

import pytest

from tools.docs.house import floors, imports

ROOT = Path(__file__).resolve().parents[2]


def test_every_room_has_a_floor_and_no_module_is_loose():
    rl = ROOT / "rl"
    rooms = {path.name for path in rl.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == {room for floor in floors() for room in floor}
    assert [path.name for path in rl.glob("*.py")] == ["__init__.py"]


def test_imports_point_down():
    floor_of = {room: number for number, floor in enumerate(floors()) for room in floor}
    upward = {
        f"{room} -> {other}": sorted(files)
        for room in floor_of
        for other, files in imports(room).items()
        if other in floor_of and floor_of[other] <= floor_of[room]
    }
    assert upward == {}, upward


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
