"""tools/bench.py from its command line, on tables that are measured in seconds."""

import json
import subprocess
import sys

import pytest

from tests.spawn import ROOT
from tools.bench_tables.report import Result, Row, store_results

SIMULATED = "control --ranks --worlds 32 --samples-per-rank 8 --mean-tokens 8 --model llama-3.1-8b"
MEASURED = "control --size tiny --ranks 1 --worlds --rounds 1"


def bench(tmp_path, table, *options):
    command = [sys.executable, ROOT / "tools" / "bench.py", *table.split(), *options]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)


def test_store_and_check(tmp_path):
    name = "32 simulated ranks, seconds of the longest plan"
    row = Row(name, {}, 0.0)  # seconds that cannot be reached
    store_results(tmp_path / "results.json", [Result("control", "", "seconds", "lower", [row], "")])
    options = "--check results.json --store results.json --out table.json"
    done = bench(tmp_path, SIMULATED, *options.split())
    assert done.returncode == 1 and f"worse: control, {name}" in done.stderr, done.stderr
    head, _, line = done.stdout.splitlines()[2:5]
    assert "agreement, s" in head and line.startswith(f"| {name}") and "refit plan, s" in head
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["rows"][0]["columns"]["samples"] == 256 and table["versions"]["torch"] and table["machine"]
    assert json.loads((tmp_path / "results.json").read_text())["control"]["rows"] == table["rows"]


@pytest.mark.slow
def test_a_step_of_the_program_is_measured(tmp_path):
    done = bench(tmp_path, MEASURED, "--out", "table.json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert 0 < row["figure"] < 1 and 0 < row["columns"]["share of reward"] < row["figure"]
