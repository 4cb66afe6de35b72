"""The cluster of cluster.sh as tests use it, and the state of its runs."""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.spawn import ROOT
from tests.toy import write_config

CLUSTER = Path(__file__).with_name("cluster.sh")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
PATIENCE_S = 600.0
"""Longest wait for an event, in seconds: machines that run tests are sometimes slow."""

TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0")


class Cluster:
    """The commands of a user, and the power switch of each node."""

    def __init__(self, lab: Path, port: int, nodes: int):
        self.lab, self.nodes = lab, nodes
        job = ("SLURM", "SBATCH", "RANK", "WORLD_SIZE", "MASTER_")
        outside = {k: v for k, v in os.environ.items() if not k.startswith(job)}
        python = Path(sys.executable).parent
        self.env = outside | dict(
            LAB=str(lab),
            PORT=str(port),
            NODES=str(nodes),
            SLURM_CONF=f"{lab}/etc/slurm.conf",
            LOCKSTEP_ROOT=str(ROOT),
            PYTHONPATH=str(ROOT),
            PATH=f"{python}:{os.environ['PATH']}:/usr/sbin:/sbin",
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",  # all nodes are addresses of it
        )

    def run(self, *command: object, cwd: Path | None = None, **env: str) -> str:
        options = dict(cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S)
        done = subprocess.run(list(map(str, command)), env=self.env | env, **options)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}: {done.stderr}{done.stdout}"
        return done.stdout

    def switch(self, what: str, *arguments: str) -> None:
        self.run("bash", CLUSTER, what, *arguments)

    def submit(self, *arguments: object, cwd: Path, **env: str) -> str:
        """Run sbatch in `cwd` and return the job's id."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, **env).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return the facts that scontrol shows of a job, or of the task ID_TASK of an array."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "-o", "show", "job", job)))

    def wait(self, job: str, states=ENDED, timeout: float = PATIENCE_S) -> dict[str, str]:
        """Wait until the job is in one of the states, and return its facts.

        A look that fails says nothing of the job (`scontrol` once ended without a word): the next one counts.
        """
        deadline = time.monotonic() + timeout
        failures = 0
        while True:
            try:
                facts, failures = self.job(job), 0
            except AssertionError:
                failures += 1
                if failures == 10:
                    raise
                facts = {"JobState": "unknown", "Reason": "scontrol failed"}
            if facts["JobState"] in states:
                return facts
            assert time.monotonic() < deadline, f"job {job} is still {facts['JobState']} ({facts['Reason']})"
            time.sleep(0.2)


PORTS = itertools.count(17000 + os.getpid() % 150 * 100, 20)
"""First ports of the clusters of this process."""


@contextlib.contextmanager
def running_cluster(nodes: int = 4) -> Iterator[Cluster]:
    """Start a cluster of so many nodes (at most 19), and end it."""
    # Not pytest's tmp_path: its path is too long for the UNIX sockets of slurmd.
    lab = Path(tempfile.mkdtemp(prefix="lab-"))
    up = Cluster(lab, next(PORTS), nodes)
    try:
        up.switch("up")
        yield up
    finally:
        with contextlib.suppress(AssertionError):  # the state of the queue does not matter here
            up.run("scancel", "--user=root")
        up.switch("down")
        shutil.rmtree(lab, ignore_errors=True)


def wait_for(condition, what: str, timeout: float = PATIENCE_S):
    """Wait until `condition()` is true, and return its value."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {timeout:.0f} s"
        time.sleep(0.1)
    return found


def write_slow_config(directory: Path, toy: Path, *, reward_s: float = 0.12) -> Path:
    """Write the config of GRPO of six steps, each seconds long because of its reward, into directory/run."""
    (directory / "slow_reward.py").write_text(
        "import time\n\n"
        "def score(prompt, response, ground_truth, **extra):\n"
        f"    time.sleep({reward_s})\n"
        "    return {'score': len(set(response)) / 6, 'acc': 0.0}\n"
    )
    reward = f"reward.function={directory}/slow_reward.py:score"
    return write_config(directory, toy, "run.max_steps=6", reward, "checkpoint.every=100")


def status(run: Path) -> dict:
    path = run / "status.json"
    return json.loads(path.read_text()) if path.exists() else {"step": 0, "checkpoint_step": 0, "state": ""}
