"""The acceptance of two nodes on a real Slurm, where no node has a GPU."""

import json
import sys

import pytest

from tests.spawn import ROOT

pytestmark = pytest.mark.slow


def test_a_killed_rank_and_a_requeue_continue_the_run(cluster, tmp_path):
    tool = (sys.executable, ROOT / "tools" / "gpu_acceptance.py")
    cluster.run(*tool, "--rehearse", "--stage", "two-nodes", "--out", tmp_path, cwd=tmp_path)
    (result,) = json.loads((tmp_path / "acceptance.json").read_text())
    print(*(f"{row['name']}: {row['value']} {row['text']}" for row in result["rows"]), sep="\n")
    assert result["verdict"] == "pass" and len(result["rows"]) == 6
