"""The same command under every launcher but srun (tests/slurm). These ranks are interpreters of their own."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spawn import ROOT, free_port, run_ranks
from tests.toy import SFT, TRAIN, write_config

PYTHON = Path(sys.executable)
MPIRUN = shutil.which("mpirun", path=f"{PYTHON.parent}:{os.environ['PATH']}")
MPI = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="mpirun or mpi4py is not installed (tools/install_cpu.sh --mpi)",
)
LAUNCHERS = {  # tests/ranks/runtime/test_mpirun.py has the discovery of ranks under a real mpirun
    "python": (1, [PYTHON]),
    "torchrun": (
        2,
        [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())],
    ),
    "mpirun": (2, [MPIRUN, "-n", "2", PYTHON]),
}


@pytest.mark.slow  # the directory of the sockets: tests/unit/sandbox/test_private_directory.py
def test_sockets_fit_where_the_path_of_temporary_files_does_not(toy, tmp_path):
    long = tmp_path / ("x" * 60) / ("y" * 60)  # a Unix socket's path has at most 107 bytes
    long.mkdir(parents=True)
    config = write_config(tmp_path, toy, "rollout.tp=2", "run.max_steps=1")
    run_ranks(2, TRAIN, "--config", config, env={"TMPDIR": str(long)}, timeout=200, fresh=True)


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=(MPI, pytest.mark.slow) if name == "mpirun" else ()) for name in LAUNCHERS],
)
def test_ranks_find_each_other(launcher, toy, tmp_path):
    world_size, command = LAUNCHERS[launcher]
    config = write_config(tmp_path, toy, *SFT)
    inherited = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    arguments = [TRAIN, "--config", config]
    result = subprocess.run(
        [*command, *arguments], env=inherited, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(f"{world_size} rank") == 1  # one world, and its first rank speaks
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["training/global_step"] for step in steps] == [1, 2]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["world_size"] == world_size
    parts = environment["start_up_s"]  # only `python` has no launcher; supervised runs import no vLLM
    assert ("launcher" in parts) == (launcher != "python") and "vLLM" not in parts
    assert parts["torch"] > 0 and parts["Megatron"] > 0


@pytest.mark.parametrize("override", ["model.path=none", "rewards"])
def test_the_end_of_torchruns_output_says_why_a_run_is_refused(override, toy, tmp_path):
    _, command = LAUNCHERS["torchrun"]
    config = write_config(tmp_path, toy, *SFT)
    arguments = ["-m", "lockstep", "train", "--config", config, override]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT)
    causes = [line for line in result.stderr.splitlines() if line.startswith("  traceback : ")]
    assert result.returncode == 1 and all(override in line for line in causes[-1:]), result.stderr
    assert causes[-1].startswith("  traceback : error: ")
