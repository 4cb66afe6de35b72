"""Imports between the rooms of rl/ point in one direction: a room imports only rooms on floors below its own,
as docs/architecture.md shows them."""

import ast
import re
from pathlib import Path

import pytest

from rl.config import wing
from rl.config.adapter import Adapter
from rl.config.agents import Agents
from rl.config.features import OPTIONAL
from rl.config.options import ConfigError
from rl.config.schema import Config, Refit, Rollout
from rl.config.wing import FEATURES
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


def test_only_the_table_names_the_options():
    """The trunk asks `rl.config.wing` for an option, so that the option's folder can be removed."""
    trunk = [
        *(file for top in ("rl", "launch", "lockstep", "tools") for file in (ROOT / top).rglob("*.py")),
        ROOT / "train_rl.py",
    ]
    naming = [
        str(file.relative_to(ROOT))
        for file in trunk
        if "rl/features/" not in str(file) and re.search(r"rl[./]features", file.read_text(encoding="utf-8"))
    ]
    assert naming == ["rl/config/wing.py"]


@pytest.mark.parametrize("folder", FEATURES)
def test_an_option_imports_no_other_option_but_its_own_base(folder):
    allowed = {folder, FEATURES[folder].extends}
    others = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in (ROOT / "rl" / "features" / folder).rglob("*.py")
        for name in re.findall(r"^ *(?:from|import) rl\.features\.(\w+)", file.read_text(), re.MULTILINE)
        if name not in allowed
    ]
    assert others == []


def test_every_folder_of_options_has_an_entry_whose_doors_exist():
    folders = {path.parent.name for path in (ROOT / "rl" / "features").glob("*/__init__.py")}
    assert folders == FEATURES.keys()
    for folder, entry in FEATURES.items():
        for door in filter(None, (entry.engine, entry.trainer, entry.sampler, *entry.doors.values())):
            file, _, name = door.partition(":")
            tree = ast.parse((ROOT / "rl" / "features" / folder / f"{file.replace('.', '/')}.py").read_text())
            known = {node.name for node in tree.body if hasattr(node, "name")} | {""}
            assert name in known, f"{folder}: {door}"


def test_every_need_of_the_table_is_refused_without_its_entry():
    assert sorted(feature for entry in FEATURES.values() for feature in entry.when.split(", ")) == list(
        OPTIONAL
    )


def test_no_door_opens_silently_where_an_option_was_removed(monkeypatch):
    """For example, an export without the prediction head would leave its tensors out."""
    config = Config(rollout=Rollout(quantization="fp8"), refit=Refit(changed_only=True))
    monkeypatch.delitem(FEATURES, "fp8_engine")
    with pytest.raises(ConfigError, match="rollout.quantization=fp8 needs an option that was removed"):
        list(wing.doors(config, "messages"))
    with pytest.raises(ConfigError, match=r"agents.environment=rl.features.gone.a:B needs the option gone"):
        wing.check_wing(Config(agents=Agents(environment="rl.features.gone.a:B")))
    with pytest.raises(ConfigError, match="--adapter needs the option fp8_engine"):
        wing.door_of("fp8_engine", "engine", needed_by="--adapter")


def test_an_entry_without_its_folder_is_an_option_that_was_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(wing, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match="adapter.kind=lora needs an option that was removed"):
        wing.check_wing(Config(adapter=Adapter(kind="lora")))


def test_a_class_name_names_one_class():
    """A reader who meets a name in a log or a signature finds its class, or its alias, with one search.

    Aliases of the same value may share a name.
    """
    classes: dict[str, dict[str, str]] = {}
    program = [
        ROOT / "train_rl.py",
        *(file for top in ("rl", "launch", "lockstep", "tools") for file in (ROOT / top).rglob("*.py")),
    ]
    for file in program:
        tree, path = ast.parse(file.read_text()), file.relative_to(ROOT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, {})[f"{path}:{node.lineno}"] = f"{path}:{node.lineno}"
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
                if re.fullmatch("_?[A-Z]+[a-z][A-Za-z0-9]*", target.id):
                    classes.setdefault(target.id, {})[ast.unparse(node.value)] = f"{path}:{node.lineno}"
    shared = {name: list(places.values()) for name, places in classes.items() if len(places) > 1}
    assert shared == {}, shared
