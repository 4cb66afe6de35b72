"""tools/dev/many_ranks.py: simulated ranks in the real protocol."""

import json
import subprocess
import sys

from tests.spawn import ROOT


def test_simulated_ranks_meet_fail_and_stop(tmp_path):
    command = [
        sys.executable,
        ROOT / "tools" / "dev" / "many_ranks.py",
        "32",
        "64",
        "--json",
        tmp_path / "out",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found["64"]["files of a fault"]["fds"] == 63 and found["64"]["rendezvous"]["bytes"] > 64 * 100
