"""The generation engine on two real ranks, one replica of tp 2. The checks are in engine_worker.py."""

import re
from pathlib import Path

import pytest

from tests.checkpoints import save_qwen2
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "engine_worker.py"
CHECKS = re.findall(r"def (check_\w+)\(self\)", WORKER.read_text())


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    out = run_ranks(2, WORKER, save_qwen2(tmp_path_factory.mktemp("engine") / "model", seed=4), timeout=200)
    return [text.split() for text in out]


@pytest.mark.parametrize("check", CHECKS)
def test_engine(passed, check):
    for rank in passed:
        assert check in rank
