"""Files and sockets of a run that another ordinary user of the node can read or reach."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.ordinary_user import NOT_PERMITTED, UID
from tests.spawn import ROOT
from tests.toy import TRAIN, write_config

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
NOBODY = dict(user=65534, group=65534, extra_groups=[])


@pytest.fixture
def scratch():
    """A directory of the run's user that everybody may enter, with a file that everybody may read."""
    if os.geteuid() != 0:
        pytest.skip("starting processes of two users takes root")
    path = Path(tempfile.mkdtemp(prefix="shared-node-", dir="/tmp"))
    path.chmod(0o755)
    (path / "open").touch(mode=0o644)
    yield path
    shutil.rmtree(path)


def seen(*places: Path | str) -> set[str]:
    """Return files and directories that another user may read or write, and sockets to connect to.

    The kernel answers, as that user.
    """
    is_open = "( -type s -writable ) -o ( ! -type s ! -type l ( -readable -o -writable ) )"
    command = ["find", *places, "-user", str(UID), "(", *is_open.split(), ")"]
    return set(subprocess.run(command, capture_output=True, text=True, cwd="/", **NOBODY).stdout.splitlines())


def reachable_addresses() -> set[str]:
    """Return the addresses, other than loopback, at which the kernel says that the run's user listens."""
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            if (state, uid) == ("0A", str(UID)):
                listening.add(local.rpartition(":")[0])
    return listening - LOOPBACK


def start(scratch: Path, config: Path, rank: int) -> subprocess.Popen:
    """Start a rank as the tasks of `flux run` are, with the umask of most clusters."""
    job = {"FLUX_TASK_RANK": rank, "FLUX_TASK_LOCAL_ID": rank, "FLUX_JOB_SIZE": 2, "FLUX_JOB_NNODES": 1}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK", "MASTER", "WORLD"))}
    command = [sys.executable, ROOT / "tests" / "ordinary_user.py", scratch, sys.executable, TRAIN]
    return subprocess.Popen(
        [*command, "--config", config],
        env=env | {"FLUX_JOB_ID": str(os.getpid())} | {key: str(value) for key, value in job.items()},
        umask=0o022,
    )


def test_another_user_reads_nothing_of_a_run_and_reaches_no_unix_socket(toy, scratch):
    shutil.copytree(toy, scratch / "toy")
    for path in (scratch / "toy", *(scratch / "toy").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    options = ("rollout.tp=2", "checkpoint.every=1", "logging.prometheus_port=0", "run.max_steps=2")
    config = write_config(scratch, scratch / "toy", *options)
    before, during, addresses = seen("/dev/shm", "/tmp"), set(), set()
    ranks = [start(scratch, config, rank) for rank in range(2)]
    while any(rank.poll() is None for rank in ranks):
        during |= seen("/dev/shm", "/tmp")
        addresses |= reachable_addresses()
        time.sleep(0.2)
    if NOT_PERMITTED in (codes := [rank.returncode for rank in ranks]):
        pytest.skip("no other user can be given this checkout")
    assert codes == [0, 0]
    run = scratch / "run"
    assert (run / "checkpoints").is_dir() and (run / "rollouts").is_dir()
    found = {path for path in during - before if not path.startswith(f"{scratch}/home/.cache")}
    assert str(scratch) in found  # the look itself works
    assert found - {str(scratch), f"{scratch}/home"} == set()
    assert addresses == set()
    assert run.stat().st_mode & 0o777 == 0o750
