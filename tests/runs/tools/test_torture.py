"""The torture tool: kills lose nothing; and it sees what it is there to see."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl.checkpoint.shards import DamagedError
from tests.spawn import ROOT
from tools.dev.torture import metrics_of, read_checkpoints

CARRIED = (
    "rollout.carry_over=true",
    "rollout.oversample=1.5",
    "rollout.max_response_tokens=16",
    f"rollout.stop_token_ids={list(range(10, 22))}",
    "rollout.max_concurrent_samples=2",
    "rollout_correction.truncate_tokens=2",
)


@pytest.mark.slow
@pytest.mark.parametrize("kills, overrides", [(10, ()), (30, CARRIED)], ids=["synchronous", "carry-over"])
def test_kills_lose_nothing(tmp_path, kills, overrides):
    out = tmp_path / "out"
    command = [
        sys.executable,
        ROOT / "tools" / "dev" / "torture.py",
        "--kills",
        str(kills),
        "--out",
        out,
        *overrides,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"nothing lost: {kills} kills" in done.stdout


def test_metrics_are_compared_without_the_clock(tmp_path):
    record = {"training/global_step": 1, "time": 5.0, "timing_s/gen": 1.0, "perf/throughput": 3.0}
    record["actor/pg_loss"] = 0.5
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert metrics_of(tmp_path) == [{"training/global_step": 1, "actor/pg_loss": 0.5}]


def test_a_directory_that_only_looks_like_a_checkpoint_is_found(tmp_path):
    assert read_checkpoints(tmp_path) == 0
    Path(tmp_path, "checkpoints", "step_000001.partial").mkdir(parents=True)
    assert read_checkpoints(tmp_path) == 0
    Path(tmp_path, "checkpoints", "step_000001").mkdir()
    with pytest.raises(DamagedError, match="checkpoint.json is missing"):
        read_checkpoints(tmp_path)
