"""tools/bench.py from its command line, on tables that are measured in seconds."""

import json
import subprocess
import sys

import pytest

from tests.spawn import ROOT

SIMULATED = "control --ranks --worlds 32 --samples-per-rank 8 --mean-tokens 8 --model llama-3.1-8b"
MEASURED = "control --size tiny --ranks 1 --worlds --rounds 1"


def bench(tmp_path, table, *options):
    command = [sys.executable, ROOT / "tools" / "bench.py", *table.split(), *options]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)


def test_plans_of_a_simulated_world(tmp_path):
    done = bench(tmp_path, SIMULATED, "--out", "table.json")
    assert done.returncode == 0, done.stderr
    head, _, row = done.stdout.splitlines()[2:5]
    assert "agreement, s" in head and row.startswith("| 32 simulated ranks") and "refit plan, s" in head
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["rows"][0]["columns"]["samples"] == 256 and table["versions"]["torch"] and table["machine"]


@pytest.mark.slow
def test_a_step_of_the_program_is_measured(tmp_path):
    done = bench(tmp_path, MEASURED, "--out", "table.json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert 0 < row["figure"] < 1 and 0 < row["columns"]["share of reward"] < row["figure"]
