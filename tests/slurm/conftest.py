"""A Slurm cluster of four nodes with two (fake) GPUs each on this machine, for all tests of this directory."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import PROGRAMS, Cluster
from tools.make_toy import make_toy


@pytest.fixture(scope="session")
def cluster():
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing:
        pytest.skip(f"no Slurm on this machine: {', '.join(missing)} not found (tools/test.sh installs it as root on Debian and Ubuntu)")
    if os.geteuid() != 0:
        pytest.skip("a cluster of several nodes on one machine takes root, for their namespaces")
    # Not pytest's tmp_path: its path is too long for the UNIX sockets of slurmd.
    lab = Path(tempfile.mkdtemp(prefix="lab-"))
    # A block of ports of this process; ten processes on, the next block.
    up = Cluster(lab, 17000 + os.getpid() % 400 * 10)
    try:
        up.switch("up")
        yield up
    finally:
        with contextlib.suppress(AssertionError):  # the queue does not matter any more
            up.run("scancel", "--user=root")
        up.switch("down")
        shutil.rmtree(lab, ignore_errors=True)


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), layers=2, intermediate=128)


@pytest.fixture
def config(toy, tmp_path) -> Path:
    """GRPO of six steps on the toy task, deterministic, each step a second long for its reward function, into tmp_path/run."""
    (tmp_path / "slow_reward.py").write_text(
        "import time\n\n"
        "def score(prompt, response, ground_truth, **extra):\n"
        "    time.sleep(0.12)\n"
        "    return {'score': len(set(response)) / 6, 'acc': 0.0}\n"
    )
    path = tmp_path / "config.yaml"
    path.write_text(
        f"""
        algorithm: grpo
        run: {{name: test, dir: {tmp_path}/run, max_steps: 6}}
        model: {{path: {toy}/model, dtype: float32}}
        data: {{train: [{toy}/train.parquet], max_prompt_tokens: 16, prompts_per_step: 8}}
        training: {{micro_batch_tokens: 200, prompts_per_minibatch: 4, optimizer: {{lr: 1.0e-3}}}}
        rollout: {{samples_per_prompt: 4, max_response_tokens: 6, deterministic: true, cpu_kv_cache_mib: 16}}
        reward: {{function: "{tmp_path}/slow_reward.py:score", workers: 1}}
        checkpoint: {{every: 100}}
        logging: {{tensorboard: false}}
        """
    )
    return path
