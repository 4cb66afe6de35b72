"""The submitit front where there is no Slurm: what it says, and how a run's end reaches submitit. tests/slurm
has the rest."""

import pickle
import sys

import pytest

from launch.submitit_jobs import RunFailed, Train, executor
from rl.config.options import ConfigError


def test_without_submitit_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'lockstep-rl\[slurm\]'"):
        executor(str(tmp_path))


def test_without_slurm_it_says_where_to_go(monkeypatch, tmp_path):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no Slurm on this machine"):
        executor(str(tmp_path))


def test_a_run_that_fails_is_a_failure_with_its_exit_code(capfd, tmp_path):
    (tmp_path / "config.yaml").write_text("run: {nmae: x}\n")
    with pytest.raises(RunFailed, match="exit code 2"):
        Train()(str(tmp_path / "config.yaml"), ["run.max_steps=1"])
    assert "did you mean run.name" in capfd.readouterr().err


def test_what_submitit_gets_back_is_the_same_call():
    pytest.importorskip("submitit")
    delayed = Train().checkpoint("config.yaml", ["run.name=a"])
    again = pickle.loads(pickle.dumps(delayed))
    assert isinstance(again.function, Train) and again.args == ("config.yaml", ["run.name=a"])
