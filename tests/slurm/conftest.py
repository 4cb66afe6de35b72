"""A Slurm cluster on this machine for the tests of this directory: four nodes with two (fake) GPUs each."""

import os
import shutil
from pathlib import Path

import pytest

from tests.records import comparable
from tests.slurm.cluster import PROGRAMS, running_cluster, write_slow_config
from tests.spawn import run_ranks
from tests.toy import TRAIN


@pytest.fixture(scope="session")
def slurm():
    """Skip the test on a machine that cannot run a cluster."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(
            f"{', '.join(missing)} not found; tools/test.sh installs Slurm, as root on Debian and Ubuntu"
        )
    if os.geteuid() != 0:
        pytest.skip("a cluster of several nodes on one machine requires root for their namespaces")


@pytest.fixture(scope="session")
def cluster(slurm):
    with running_cluster() as up:
        yield up


@pytest.fixture
def config(toy, tmp_path) -> Path:
    return write_slow_config(tmp_path, toy)


@pytest.fixture(scope="session")
def undisturbed(toy, tmp_path_factory) -> list[dict]:
    """Return the metrics of the same run on two ranks without Slurm and without interruption."""
    directory = tmp_path_factory.mktemp("undisturbed")
    run_ranks(2, TRAIN, "--config", write_slow_config(directory, toy, reward_s=0), timeout=200)
    return comparable(directory / "run")
