"""The wheel, built from the source distribution and installed elsewhere, runs the quickstart's config."""

import os
import subprocess
import sys
import sysconfig
import venv

import pytest

from tests.doc_commands import copy_files

TRAIN = """
import lockstep
config = lockstep.HOME / "configs" / "quickstart.yaml"
keys = {"model.path": "runs/toy/model", "run.max_steps": 1, "data.prompts_per_step": 32}
run = lockstep.train(config, keys | {"validation.every": 0, "checkpoint.export_hf": False}, ranks=2)
assert run.state == "finished" and list(run.values("critic/score/mean")) == [1], run
assert list(run.checkpoints) == [1]
"""


@pytest.mark.slow
def test_the_wheel_runs_the_quickstarts_config_from_elsewhere(tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command, cwd=tmp_path):
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    source, home = tmp_path / "source", tmp_path / "user"
    source.mkdir(), home.mkdir()
    copy_files(source)
    run(sys.executable, "setup.py", "-q", "sdist", cwd=source)
    (archive,) = (source / "dist").iterdir()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, archive)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("lockstep_rl-")
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "-q", "--no-deps", wheel)
    packages = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    with open(f"{packages}/others.pth", "w") as file:  # a path alone: its own .pth files are not read
        file.write(sysconfig.get_path("purelib") + "\n")
    added = {name for name in os.listdir(packages) if not name.startswith(("pip", "setuptools", "__"))}
    assert {name for name in added if "." not in name} == {"lockstep"}

    lockstep = python.with_name("lockstep")
    assert "train" in run(lockstep, "--help", cwd=home)
    run(lockstep, "data", "toy", "--out", "runs/toy", cwd=home)
    run(python, "-c", TRAIN, cwd=home)
    assert "page: runs/quickstart/report.html" in run(lockstep, "report", "runs/quickstart", cwd=home)
    job = ("submit", "--config", "runs/quickstart/config.yaml", "--nodes", "1", "--dry-run")
    text = run(lockstep, *job, "--force", cwd=home)
    assert "lockstep/home" in text and "not submitted (--dry-run)" in text
