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


class Staged:
    """Jobs on the same two nodes, whose ranks start from copies of environment, model and data."""

    def __init__(self, cluster, toy: Path, directory: Path, environment: Path):
        self.cluster, self.toy, self.directory = cluster, toy, directory
        self.config = write_config(directory, toy, *SFT, "run.max_steps=1")
        words = (f"environment={environment}", f"model.path={toy}/model", f"data.train='{toy}/train.parquet'")
        self.stage = {"LOCKSTEP_STAGE": " ".join(words), "LOCKSTEP_STAGE_ARCHIVES": f"{directory}/archives"}

    def submit(self, run: str, disk: object) -> str:
        own = (*TWO_NODES, "--nodelist=node1,node2", ROOT / "slurm" / "train.sbatch", self.config)
        values = self.stage | {"LOCKSTEP_NODE_DISK": str(disk)}
        return self.cluster.submit(*own, f"run.dir={self.directory}/{run}", cwd=self.directory, **values)

    def places(self, run: str, job: str) -> list[str]:
        """Return the paths of model and data in the config of a run, when its job has ended."""
        assert self.cluster.wait(job)["JobState"] == "COMPLETED", self.log(job)
        found = load_config(str(self.directory / run / "config.yaml"))
        return [found.model.path, *found.data.train]

    def log(self, job: str) -> str:
        return (self.directory / f"train-{job}.out").read_text()


def test_ranks_start_from_copies_on_their_nodes(cluster, toy, tmp_path):
    """/dev/shm is each node's own. Two jobs stage at once; a third one finds a disk of 64 kB."""
    seen = tmp_path / "seen"
    seen.mkdir()
    environment = write_environment(tmp_path / "venv", seen)
    staged = Staged(cluster, toy, tmp_path, environment)
    jobs = {run: staged.submit(run, "/dev/shm") for run in ("first", "second")}
    for run, job in jobs.items():
        places = staged.places(run, job)
        assert all(place.startswith("/dev/shm/lockstep-stage-0/") for place in places), places
    archives = sorted((tmp_path / "archives").iterdir())
    assert len(archives) == 3 and all(archive.suffix == ".tar" for archive in archives)
    assert any(name.name.startswith("-dev-shm-lockstep-stage-0-") for name in seen.iterdir())
    assert list(environment.glob("lib/*/site-packages/__pycache__/sitecustomize.*.pyc"))
    (tmp_path / "small").mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=64k", "small", tmp_path / "small")
    cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", "--nodelist=node1,node2", *mount)
    job = staged.submit("full", tmp_path / "small")
    assert staged.places("full", job)[0] == f"{toy}/model"
    assert f"the ranks read {toy}/model" in staged.log(job)
