"""A Slurm cluster on this machine for the tests of this directory: four nodes with two (fake) GPUs each."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.records import comparable
from tests.slurm.cluster import PROGRAMS, TWO_NODES, Cluster, write_slow_config
from tests.spawn import ROOT


@pytest.fixture(scope="session")
def cluster():
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(
            f"{', '.join(missing)} not found; tools/test.sh installs Slurm, as root on Debian and Ubuntu"
        )
    if os.geteuid() != 0:
        pytest.skip("a cluster of several nodes on one machine requires root for their namespaces")
    # Not pytest's tmp_path: its path is too long for the UNIX sockets of slurmd.
    lab = Path(tempfile.mkdtemp(prefix="lab-"))
    # A block of ten ports that depends on the process id.
    up = Cluster(lab, 17000 + os.getpid() % 400 * 10)
    try:
        up.switch("up")
        yield up
    finally:
        with contextlib.suppress(AssertionError):  # the state of the queue does not matter here
            up.run("scancel", "--user=root")
        up.switch("down")
        shutil.rmtree(lab, ignore_errors=True)


@pytest.fixture
def config(toy, tmp_path) -> Path:
    return write_slow_config(tmp_path, toy)


@pytest.fixture(scope="session")
def undisturbed(cluster, toy, tmp_path_factory) -> list[dict]:
    """Return the metrics of the same run on two nodes without an interruption."""
    directory = tmp_path_factory.mktemp("undisturbed")
    command = (ROOT / "slurm" / "train.sbatch", write_slow_config(directory, toy))
    job = cluster.submit(*TWO_NODES, *command, cwd=directory)
    assert cluster.wait(job)["JobState"] == "COMPLETED", (directory / f"train-{job}.out").read_text()
    return comparable(directory / "run")
