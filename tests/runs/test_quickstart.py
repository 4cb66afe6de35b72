"""The command of the README, in a copy of what git tracks, with the environment that runs the tests."""

import json
import os
import subprocess
import sys

import pytest

from tests.spawn import ROOT


@pytest.mark.slow
def test_the_quickstart_teaches_a_model_to_add(tmp_path):
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(
        ["tar", "-c", "--null", "-T", "-", "-f", tmp_path / "tree.tar"], cwd=ROOT, input=tracked, check=True
    )
    subprocess.run(["tar", "-xf", "tree.tar"], cwd=tmp_path, check=True)
    # The installer is not tested here. It would change this environment, because the stamp of its packages
    # differs.
    (tmp_path / "tools" / "install_cpu.sh").write_text("")
    env = os.environ | {
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
    }
    subprocess.run(["bash", "tools/quickstart.sh"], cwd=tmp_path, env=env, check=True, timeout=720)
    records = [
        json.loads(line) for line in (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    ]
    assert [record["training/global_step"] for record in records] == list(range(151))
    accuracies = [
        record["val-core/addition/acc/mean@1"]
        for record in records
        if "val-core/addition/acc/mean@1" in record
    ]
    assert 0.2 <= accuracies[0] <= 0.65 and accuracies[-1] >= 0.9
    assert (tmp_path / "runs/quickstart/report.png").read_bytes().startswith(b"\x89PNG")
