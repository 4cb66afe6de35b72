"""A rank does not use a directory of compile caches that another user of the node could have made."""

import os
import subprocess
import sys

from tests.spawn import ROOT

RANK = """
import os
from rl.runtime.ranks import discover
from rl.runtime.session import session
with session(discover()):
    print(os.environ["TRITON_CACHE_DIR"])
"""


def test_a_rank_does_not_load_what_another_user_compiled(tmp_path):
    hostile = tmp_path / "lockstep-cache"
    hostile.mkdir()
    hostile.chmod(0o777)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TORCHINDUCTOR", "VLLM_CACHE"))}
    caches = {
        "LOCKSTEP_CACHE": str(hostile),
        "TRITON_CACHE_DIR": f"{hostile}/triton",
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", RANK], env=kept | caches, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    cache = done.stdout.split()[-1]
    assert cache.startswith(f"{tmp_path}/lockstep-cache-") and not cache.startswith(f"{hostile}/"), cache
    assert f"{hostile} can be written by other users" in done.stderr
