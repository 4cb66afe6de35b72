"""status.json: who writes the end of a run, and what stays."""

import errno
import json
import os
from pathlib import Path

import pytest

from rl.faults.lock import is_of_another
from rl.run_directory.status import Status
from tests.full_disk import full_disk

REASON = "score of step 3 took longer than watchdog.limits.score=600 s"


@pytest.fixture
def ranks(tmp_path):
    """Rank 0 and rank 1 of one start, which is at step 2."""
    found = [Status(str(tmp_path), max_steps=9, leads=leads, start="a") for leads in (True, False)]
    found[0].write(step=2, checkpoint_step=1)
    return found


def facts(directory) -> dict:
    return json.loads((directory / "status.json").read_text())


def test_any_rank_writes_the_end_and_the_first_cause_stays(ranks, tmp_path):
    ranks[1].fail(REASON)
    ranks[0].fail("lost rank 1")
    ranks[0].write(step=3)  # its main thread has not noticed yet
    ranks[0].write(state="finished")
    found = facts(tmp_path)
    assert (found["state"], found["reason"]) == ("failed", REASON)
    assert (found["step"], found["checkpoint_step"], found["max_steps"]) == (2, 1, 9)


def test_only_rank_0_writes_progress(ranks, tmp_path):
    ranks[1].write(step=7)
    assert facts(tmp_path)["step"] == 2


def test_a_run_that_ended_in_order_stays_so(ranks, tmp_path):
    ranks[0].write(state="stopped", reason="SIGUSR2")
    ranks[1].fail("lost rank 0")
    assert (facts(tmp_path)["state"], facts(tmp_path)["reason"]) == ("stopped", "SIGUSR2")


def test_the_next_start_writes_over_a_failure(ranks, tmp_path):
    ranks[0].fail(REASON)
    Status(str(tmp_path), max_steps=9, leads=True, start="b").write(step=1)
    assert (facts(tmp_path)["state"], facts(tmp_path)["reason"]) == ("running", "")


def test_a_failure_in_start_up_keeps_earlier_steps(ranks, tmp_path):
    ranks[0].write(state="stopped")
    Status(str(tmp_path), max_steps=12, leads=False, start="b").fail("lost rank 0")
    found = facts(tmp_path)
    assert (found["state"], found["reason"], found["start"]) == ("failed", "lost rank 0", "b")
    assert (found["step"], found["checkpoint_step"], found["max_steps"]) == (2, 1, 12)


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_that_was_taken_over_leaves_the_others_status(ended, ranks, tmp_path):
    if ended:  # it has released its lock
        Status(str(tmp_path), max_steps=9, leads=True, start="b").write()
    else:
        (tmp_path / "lock.json").write_text(json.dumps({"token": "b"}))
    ousted = Status(
        str(tmp_path),
        max_steps=9,
        leads=True,
        start="a",
        is_taken_over=lambda: is_of_another(str(tmp_path), "a", ""),
    )
    before = facts(tmp_path)
    ousted.write(step=7)
    ousted.fail("LockLost")
    assert facts(tmp_path) == before


def test_a_refusal_ends_only_a_running_state(ranks, tmp_path):
    again = Status(str(tmp_path), max_steps=9, leads=True, start="b")
    ranks[0].write(state="finished")
    again.refuse("checkpoint.resume=never")
    assert facts(tmp_path)["state"] == "finished"
    ranks[0].write(state="running")  # it was killed
    again.refuse("checkpoint.resume=never")
    assert (facts(tmp_path)["state"], facts(tmp_path)["reason"]) == ("failed", "checkpoint.resume=never")


def test_an_interrupted_run_is_stopped(ranks, tmp_path):
    Status(str(tmp_path), max_steps=9, leads=True, start="b").interrupt()  # in its start-up
    assert facts(tmp_path)["state"] == "running"
    ranks[0].interrupt()
    assert (facts(tmp_path)["state"], facts(tmp_path)["reason"]) == ("stopped", "interrupted")


def test_the_copy_of_a_job_is_identical(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("LOCKSTEP_STATUS", str(tmp_path / "logs" / "status.json"))
    Status(str(tmp_path), max_steps=9, leads=True, start="a").write(step=2, checkpoint_step=1)
    Status(str(tmp_path), max_steps=9, leads=False, start="a").fail(REASON)
    assert facts(tmp_path) == facts(tmp_path / "logs")
    assert sorted(os.listdir(tmp_path)) == ["logs", "status.json"]


def test_a_failing_disk_does_not_keep_a_run_from_ending(ranks, capsys):
    with full_disk():
        ranks[1].fail(REASON)
    assert "status.json cannot be written: [Errno 27] File too large" in capsys.readouterr().err


def test_a_run_that_a_full_disk_ended_does_not_look_alive(ranks, tmp_path, monkeypatch):
    def full(path, text):
        path.touch()  # a directory may have room for a name
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    ranks[0].refuse("the disk is full")
    assert (facts(tmp_path)["state"], facts(tmp_path)["reason"]) == ("failed", "the disk is full")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
