"""tools/bench.py from its command line, on tables that are measured in seconds."""

import json
import subprocess
import sys

import pytest

from tests.spawn import ROOT

SIMULATED = "control --ranks --worlds 32 --samples-per-rank 8 --mean-tokens 8 --model llama-3.1-8b"
PACKING = "packing --sizes tiny --ranks 1 --samples 4 --max-tokens 64 --rounds 1"


def bench(tmp_path, table, *options):
    command = [sys.executable, ROOT / "tools" / "bench.py", *table.split(), *options]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)


def test_store_and_check(tmp_path):
    done = bench(tmp_path, SIMULATED, "--store", "results.json", "--out", "table.json")
    assert done.returncode == 0, done.stderr
    head, _, row = done.stdout.splitlines()[2:5]
    assert "agreement, s" in head and row.startswith("| 32 simulated ranks") and "refit plan, s" in head
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["rows"][0]["columns"]["samples"] == 256 and table["versions"]["torch"] and table["machine"]
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["control"]["rows"] == table["rows"]
    stored["control"]["rows"][0]["figure"] = 0.0  # seconds that cannot be reached
    (tmp_path / "results.json").write_text(json.dumps(stored))
    done = bench(tmp_path, SIMULATED, "--check", "results.json")
    assert done.returncode == 1 and "worse: control, 32 simulated ranks" in done.stderr


@pytest.mark.slow
def test_packing(tmp_path):
    done = bench(tmp_path, PACKING, "--out", "table.json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert row["figure"] > 0 and row["columns"]["padded / real tokens"] > 1
