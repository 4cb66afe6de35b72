"""The scheduler beside which the turns of a run are tested."""

import pytest

from launch import slurm
from launch.anywhen import queue, record, turns
from tests.unit.launch.hostile_slurm import HostileSlurm


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Return a function that makes a HostileSlurm, whose commands and clock the run then has."""

    def make(*arguments, **values) -> HostileSlurm:
        (tmp_path / "launch").mkdir()
        fake = HostileSlurm(tmp_path, *arguments, **values)
        fake.monkeypatch = monkeypatch
        monkeypatch.setattr(slurm, "run", fake.run)
        monkeypatch.setattr(record.os, "fsync", lambda file: fake.act())
        for module in (turns, queue, record):
            monkeypatch.setattr(module, "time", fake)
        return fake

    return make
