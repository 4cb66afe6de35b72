"""Trajectories in the real engine: two ranks, one replica of tp 2 (agent_engine_worker.py)."""

import re
from pathlib import Path

import pytest

from tests.checkpoints import save_qwen2
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "agent_engine_worker.py"
CHECKS = re.findall(r"def (check_\w+)\(self\)", WORKER.read_text())


@pytest.mark.parametrize(
    "num_events, timeout", [(200, 200), pytest.param(100_000, 3000, marks=pytest.mark.slow)]
)
def test_agent_engine(tmp_path, num_events, timeout):
    checkpoint = save_qwen2(tmp_path / "model", seed=4)
    out = run_ranks(2, WORKER, checkpoint, num_events, tmp_path, timeout=timeout)
    assert [text.split() for text in out] == [CHECKS, CHECKS]
