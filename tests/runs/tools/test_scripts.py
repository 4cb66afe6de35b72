"""Commands run from any directory and report errors without a traceback."""

import os
import subprocess
import sys

from tests.spawn import ROOT

GSM8K = ROOT / "tests" / "data" / "gsm8k"


def run(directory, *arguments, **environment):
    command = [sys.executable, "-m", "lockstep", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, env=environment)


def test_prepare_data(tmp_path):
    done = run(tmp_path, "data", "gsm8k", "--source", GSM8K, "--out", "out")
    assert done.returncode == 0 and "out/train.parquet: 32 rows" in done.stdout, done.stderr
    done = run(tmp_path, "data", "gsm8k", "--source", "nowhere", "--out", "out")
    assert done.returncode == 2
    assert "lacks train.jsonl" in done.stderr and "Traceback" not in done.stderr


def test_prepare_data_without_internet(tmp_path):
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = run(tmp_path, "data", "gsm8k", "--from-hub", "--out", "out", **offline)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    error = done.stderr.strip().split("error: ")[1]
    assert "pass its files with --source" in error and "\n" not in error


def test_plan_refit_with_uneven_stages(tmp_path):
    model = ROOT / "configs" / "models" / "qwen2.5-0.5b"
    layouts = (
        "--train tp=2,pp=5 --rollout tp=2,pp=2 --world-size 20 --ranks-per-node 2 --dtype float32".split()
    )
    done = run(tmp_path, "plan", "refit", "--model", model, *layouts)
    assert done.returncode == 0 and "least possible" in done.stdout, done.stderr
