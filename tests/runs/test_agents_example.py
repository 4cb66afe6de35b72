"""The example of docs/agents.md, as it stands there."""

import re

from tests.records import records
from tests.spawn import ROOT, run_ranks
from tests.toy import TRAIN


def block(file):
    """The block of docs/agents.md that begins with the name of a file."""
    text = (ROOT / "docs" / "agents.md").read_text()
    return re.search(rf"```\w+\n(# {re.escape(file)}\n.*?)```", text, re.DOTALL)[1]


def test_example_of_the_docs_trains_for_two_steps(tmp_path, toy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guess.py").write_text(block("guess.py"))
    config = block("guess.yaml").replace("runs/toy", str(toy))
    assert str(toy) in config
    (tmp_path / "guess.yaml").write_text(config)
    run_ranks(2, TRAIN, "--config", "guess.yaml", "rollout.cpu_kv_cache_mib=16", timeout=400)
    steps = records(tmp_path / "runs" / "first_agent")
    assert [step["training/global_step"] for step in steps] == [1, 2]
    assert all(step["agents/turns"] > 1 for step in steps)
