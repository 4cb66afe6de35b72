"""The tasks of tools/agent_toy.sh learn what docs/agents.md shows."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.records import records
from tests.spawn import ROOT
from tools.consumed import count


def curve(run, task):
    """Return the share of solved tasks at each validation."""
    name = f"val-core/{task}/acc/mean@"
    return [value for record in records(run) for key, value in record.items() if key.startswith(name)]


@pytest.fixture
def toys(tmp_path):
    """Return a function that runs tools/agent_toy.sh in a copy of the tree, and returns its runs."""
    for name in ("rl", "configs", "launch", "lockstep", "tools", "train_rl.py", "pyproject.toml"):
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, tmp_path / name)
    paths = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    env = os.environ | paths | {"VIRTUAL_ENV": sys.prefix}

    def start(task):
        subprocess.run(["bash", "tools/agent_toy.sh", task], cwd=tmp_path, env=env, check=True, timeout=3000)
        return tmp_path / "runs"

    return start


@pytest.mark.slow
def test_guessing_learns_to_remember_its_turns(toys):
    solved = curve(toys("guess") / "guess", "guess")
    assert solved[0] < 0.45 and solved[-1] >= 0.9


@pytest.mark.slow
def test_multiplication_learns_to_use_its_tool(toys):
    runs = toys("multiply")
    with_tool, alone = (curve(runs / name, "multiply") for name in ("multiply", "multiply_alone"))
    assert with_tool[0] < 0.3 and with_tool[-1] >= 0.9
    assert max(alone) < 0.3


@pytest.mark.slow
def test_multiplication_is_learned_with_everything_at_once(toys):
    run = toys("lab") / "lab"
    solved, found = curve(run, "multiply"), count(run)
    assert solved[0] < 0.3 and solved[-1] >= 0.9
    assert found.is_exact and (found.consumed, found.dropped) == (640, 0)
    last = records(run)[-1]
    received, planned = (last[f"perf/held_collected_bytes_{name}"] for name in ("received", "planned"))
    assert received == planned > 0 and 0 < last["staleness/mean"] < 1


@pytest.mark.slow
def test_self_play_learns_the_rules_of_tictactoe(toys):
    by_the_rules = curve(toys("tictactoe") / "tictactoe", "tictactoe")
    assert by_the_rules[0] < 0.15 and max(by_the_rules) >= 0.3
