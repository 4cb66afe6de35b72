"""Rank discovery and rendezvous under a real mpirun."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spawn import ROOT


def test_two_ranks_of_a_real_mpirun(tmp_path):
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed in this environment")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        pytest.skip("there is no mpirun beside this interpreter or in PATH")
    # To files: mpirun mixes what ranks print.
    program = (
        "import dataclasses, json, sys; from rl.runtime.ranks import discover;"
        "from rl.runtime.rendezvous import join_ranks;"
        "ranks = join_ranks(discover());"
        "plain = dataclasses.asdict(dataclasses.replace(ranks, listener=None, key=None));"
        "plain['key'] = ranks.key.secret.hex();"
        "open(f'{sys.argv[1]}/{ranks.rank}', 'w').write(json.dumps(plain))"
    )
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in others}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    command = [mpirun, "-n", "2", sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert (first["local_rank"], second["local_rank"]) == (0, 1)
    for ranks in (first, second):
        assert (ranks["world_size"], ranks["local_world_size"], ranks["launcher"]) == (2, 2, "mpi")
        assert ranks["master_addr"] == "127.0.0.1"
    assert first["master_port"] == second["master_port"] > 1024
    assert first["key"] == second["key"] and len(first["key"]) == 64
