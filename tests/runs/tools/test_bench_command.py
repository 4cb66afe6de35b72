"""tools/dev/bench.py from its command line, on tables that are measured in seconds."""

import json
import subprocess
import sys

import pytest

from tests.spawn import ROOT

SIMULATED = "control --ranks --worlds 32 --samples-per-rank 8 --mean-tokens 8 --model llama-3.1-8b"
MEASURED = "control --size tiny --ranks 1 --worlds --rounds 1"


def bench(tmp_path, table, *options):
    command = [sys.executable, ROOT / "tools" / "dev" / "bench.py", *table.split(), *options]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)


def test_plans_of_a_simulated_world(tmp_path):
    done = bench(tmp_path, SIMULATED, "--out", "table.json")
    assert done.returncode == 0, done.stderr
    head, _, row = done.stdout.splitlines()[2:5]
    assert "agreement, s" in head and row.startswith("| 32 simulated ranks") and "refit plan, s" in head
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["rows"][0]["columns"]["samples"] == 256 and table["versions"]["torch"] and table["machine"]


def test_the_peer_must_be_installed(tmp_path):
    done = bench(tmp_path, "peer --peer nowhere")
    assert done.returncode == 1
    assert "pip install --no-deps --target nowhere trl" in done.stderr


@pytest.mark.slow
def test_a_step_of_the_program_is_measured(tmp_path):
    done = bench(tmp_path, MEASURED, "--out", "table.json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert 0 < row["figure"] < 1 and 0 < row["columns"]["share of reward"] < row["figure"]


CONSTANTS = dict(layers=8, parameters=2_581_312, operations=21_146_107_904, product=1e11, copy=4e10)
CONSTANTS |= dict(scores_many=1_610_612_736, scores_long=6_442_450_944, cache_bytes=4096, cached=64)
CONSTANTS |= dict(forward_1=0.006, update_1=0.03, forward_5=0.025, update_5=0.08)
CONSTANTS |= dict(update_many=1.0, update_long=1.4, decode_1=0.0025, decode_many=0.005, decode_long=0.009)
CONSTANTS |= dict(gather_small=1e-3, gather_large=5e-3, scatter_small=1.5e-3, scatter_large=8e-3)
CONSTANTS |= dict(all_reduce=1e-5)
"""Seconds and rates of the kind that `tools.dev.bench_tables.machine` measures; none are measured here."""


@pytest.mark.slow
def test_a_step_is_predicted_and_measured(tmp_path):
    (tmp_path / "constants.json").write_text(json.dumps({"2": CONSTANTS}))
    options = ("--constants", "constants.json", "--layouts", "cp 2", "--rounds", "1", "--out", "table.json")
    done = bench(tmp_path, "measured", *options)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "table.json").read_text())["rows"]
    columns = row["columns"]
    assert row["figure"] == columns["predicted, s"] / columns["measured, s"] > 0
    assert columns["idle, s"] == 0 and not columns["old_log_prob"].startswith("0 /")
