"""Staging on a real Slurm: the ranks start from copies of environment, model and data on their nodes."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rl.config.schema import load_config
from tests.slurm.cluster import TWO_NODES
from tests.spawn import ROOT
from tests.toy import SFT, write_config

pytestmark = pytest.mark.slow

SAYS = "import pathlib, sys\npathlib.Path('{0}', sys.prefix.replace('/', '-')).touch()\n"


def write_environment(directory: Path, seen: Path) -> Path:
    """Write an environment with this one's packages, whose interpreters leave their prefix in `seen`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    (packages,) = directory.glob("lib/*/site-packages")
    (packages / "parent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (packages / "sitecustomize.py").write_text(SAYS.format(seen))
    return directory


def test_ranks_start_from_copies_on_their_nodes(cluster, toy, tmp_path):
    """/dev/shm is each node's own. The second job finds archive and copies of the first."""
    seen = tmp_path / "seen"
    seen.mkdir()
    environment = write_environment(tmp_path / "venv", seen)
    config = write_config(tmp_path, toy, *SFT, "run.max_steps=1")
    words = (f"environment={environment}", f"model.path={toy}/model", f"data.train={toy}/train.parquet")
    stage = {"LOCKSTEP_NODE_DISK": "/dev/shm", "LOCKSTEP_STAGE_ARCHIVES": f"{tmp_path}/archives"}
    for run in ("first", "second"):
        command = (*TWO_NODES, ROOT / "slurm" / "train.sbatch", config, f"run.dir={tmp_path}/{run}")
        job = cluster.submit(*command, cwd=tmp_path, LOCKSTEP_STAGE=" ".join(words), **stage)
        log = tmp_path / f"train-{job}.out"
        assert cluster.wait(job)["JobState"] == "COMPLETED", log.read_text()
        found = load_config(str(tmp_path / run / "config.yaml"))
        places = [found.model.path, *found.data.train]
        assert all(place.startswith("/dev/shm/lockstep-stage-0/") for place in places), places
    archives = sorted((tmp_path / "archives").iterdir())
    assert len(archives) == 3 and all(archive.suffix == ".tar" for archive in archives)
    assert any(name.name.startswith("-dev-shm-lockstep-stage-0-") for name in seen.iterdir())
    assert list(environment.glob("lib/*/site-packages/__pycache__/sitecustomize.*.pyc"))
