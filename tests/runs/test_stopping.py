"""A run that is asked to stop: what is on disk, its exit code, and that it goes on as if nothing had been."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.records import comparable
from tests.spawn import ROOT, RanksFailed, run_ranks
from tests.toy import SFT, TRAIN, write_config


@pytest.fixture
def config(toy, tmp_path) -> Path:
    """Return the config of GRPO of four steps, a few samples at a time: a generation takes a while."""
    batch = ("data.prompts_per_step=16", "training.prompts_per_minibatch=8", "run.max_steps=4")
    return write_config(
        tmp_path, toy, *batch, "rollout.max_response_tokens=48", "rollout.max_concurrent_samples=4"
    )


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())


def touch_after_step(run: Path, step: int, name: str) -> threading.Thread:
    """Makes run/name as soon as the step is on disk."""

    def watch():
        while not (run / "status.json").exists() or status(run)["step"] < step:
            time.sleep(0.01)
        (run / name).touch()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow  # a Slurm job does the same in tests/slurm/test_jobs.py
def test_a_run_stopped_in_a_generation_goes_on_exactly(config, tmp_path):
    run_ranks(2, TRAIN, "--config", config, f"run.dir={tmp_path}/whole", timeout=240)
    # By hand: the file.
    watcher = touch_after_step(tmp_path / "run", 2, "stop")
    run_ranks(2, TRAIN, "--config", config, timeout=240)
    watcher.join()
    stopped = status(tmp_path / "run")
    assert (stopped["state"], stopped["reason"]) == ("stopped", "the file 'stop'") and stopped[
        "checkpoint_step"
    ] == stopped["step"] < 4
    # It stays stopped until the file is gone.
    with pytest.raises(RanksFailed) as refused:
        run_ranks(2, TRAIN, "--config", config, timeout=240)
    assert refused.value.returncodes == [2, 2] and "remove it to continue the run" in refused.value.stderr[0]
    (tmp_path / "run" / "stop").unlink()
    # Then by its time: already over when the first step would begin, so nothing is done twice.
    with pytest.raises(RanksFailed) as late:
        run_ranks(2, TRAIN, "--config", config, "run.max_time=0:00:01", timeout=240)
    assert late.value.returncodes == [75, 75] and "run.max_time is over" in late.value.stderr[0]
    assert status(tmp_path / "run")["checkpoint_step"] == stopped["checkpoint_step"]
    run_ranks(2, TRAIN, "--config", config, timeout=240)
    assert status(tmp_path / "run")["state"] == "finished"
    assert comparable(tmp_path / "run") == comparable(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("way, stopped_at", [("redo", 0), ("finish", 1)])
def test_what_becomes_of_the_generation(config, tmp_path, way, stopped_at):
    """USR2 while the first step generates, for several seconds: it is dropped, or the step completed."""
    long = (
        "rollout.max_response_tokens=200",
        "data.prompts_per_step=256",
        "rollout.max_concurrent_samples=64",
        "run.max_steps=2",
    )
    overrides = (f"run.on_stop_in_generation={way}", *long, "training.micro_batch_tokens=2000")
    command = [str(part) for part in (sys.executable, TRAIN, "--config", config, *overrides)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("ready in"):
            time.sleep(2.0)  # into the generation
            process.send_signal(signal.SIGUSR2)
    assert process.wait(240) == 75, "".join(said)
    assert f"stopped before step {stopped_at + 1}: SIGUSR2" in "".join(said)
    assert status(tmp_path / "run")["checkpoint_step"] == stopped_at


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_the_next_start_begins_where_a_stop_said(toy, tmp_path, stride):
    """Every kind of stop with every combination of `checkpoint.*`; a start is a call within one process."""
    config = write_config(tmp_path, toy, *SFT, "training.prompts_per_minibatch=0")
    arguments = (tmp_path, stride, "--config", config)
    [out] = run_ranks(1, ROOT / "tests/runs/stopping_worker.py", *arguments, timeout=500)
    *broken, number = out.splitlines()
    assert not broken and int(number) == 288 // stride, "\n".join(broken)
