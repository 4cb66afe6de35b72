"""lockstep.train with real ranks: results, the run's own sentences as exceptions, and Ctrl-C."""

import signal

import pytest

import lockstep
from rl.runtime.ranks import Ranks
from tests.toy import SFT, write_config

OWN = """
import os
import signal
import time
from pathlib import Path

from rl.algorithms import sft

NEEDS = ("responses",)
DEFAULTS = {"validation.loss": True, "validation.greedy": False}


def collect(phases):
    return sft.collect(phases)


def learn(phases, batch):
    if phases.step.number == 2:
        starts = Path(os.environ["STARTS"])
        starts.write_text(starts.read_text() + "x")
        if starts.read_text() == "x":
            os.kill(os.getppid(), signal.SIGINT)  # Ctrl-C in the program that called lockstep.train
            while True:
                time.sleep(0.1)
        if starts.read_text() == "xx":
            raise ZeroDivisionError("of the second start")
    sft.learn(phases, batch)
"""


def test_two_ranks_return_what_the_run_has_written(toy, tmp_path, monkeypatch):
    Ranks(0, 1, 0, 1, "single", "127.0.0.1").export(found := {})
    for name, value in found.items():  # a rank calls it
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    config, more = write_config(tmp_path, toy, *SFT), tmp_path / "more.yaml"
    more.write_text("run: {max_steps: 1}")
    found = lockstep.train([config, more], {"checkpoint.every": 1, "run.dir": tmp_path / "run"}, ranks=2)
    assert (found.state, found.directory, [*found.checkpoints]) == ("finished", tmp_path / "run", [1])
    assert [*found.values("sft/loss")] == [1] and lockstep.read_run(tmp_path / "run") == found
    with pytest.raises(ValueError, match="training.tp=3"):
        lockstep.train(config, {"training.tp": 3, "run.dir": tmp_path / "wrong"}, ranks=2)


@pytest.fixture
def ctrl_c():
    """Let SIGINT interrupt this process and its runs, also if a shell has started the tests with `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_run_continues_and_a_fault_is_named(toy, tmp_path, monkeypatch, ctrl_c):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "starts").write_text("")
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    config = write_config(tmp_path, toy, *SFT)
    keys = {"algorithm": tmp_path / "own.py", "checkpoint.every": 1}
    with pytest.raises(KeyboardInterrupt):
        lockstep.train(config, keys)
    found = lockstep.read_run(tmp_path / "run")
    assert (found.state, [*found.checkpoints]) == ("stopped", [1])
    with pytest.raises(lockstep.RunError, match="exit code 1: .*ZeroDivisionError: of the second start"):
        lockstep.train(config, keys)
    found = lockstep.train(config, keys)
    assert (found.state, [*found.values("sft/loss")]) == ("finished", [1, 2])
