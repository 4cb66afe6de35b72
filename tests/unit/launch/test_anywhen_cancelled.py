"""Jobs of a run that the user, an administrator, Slurm or the run itself cancels, in virtual time."""

import os

import pytest

from launch import slurm
from launch.anywhen import queue, turns
from launch.anywhen.record import is_over, note
from rl.config.elastic import JobLimits
from tests.unit.launch.hostile_slurm import TURN_S, fail_to_launch, no_answer, two_jobs
from tests.unit.launch.queue_simulator import HOUR


def test_a_job_that_the_user_cancels_is_not_replaced(hostile):
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    steps = fake.steps
    fake.end(first, "CANCELLED")  # the successor starts, and leaves
    fake.sleep(HOUR)
    assert (successor.state, len(fake.requests), fake.live()) == ("COMPLETED", 2, [])
    assert fake.steps == steps
    assert f"job {first.id} was cancelled" in fake.turn()
    (fake.directory / "stop").unlink()
    fake.turn()
    assert len(fake.requests) == 3 and fake.live()


CANCELLED = "slurmstepd: error: *** JOB {} ON node1 CANCELLED AT 2026-11-30T00:00:00{} ***\n"


@pytest.mark.parametrize(
    ("reason", "other", "requests"),
    [("", 0, 1), ("", 1, 2), (" DUE TO PREEMPTION", 0, 2), (" DUE TO TIME LIMIT", 0, 2)],
)
def test_only_a_job_that_is_being_cancelled_requests_no_other(
    hostile, monkeypatch, tmp_path, reason, other, requests
):
    """Slurm ends a job that it pre-empts, that reaches its limit or that an administrator cancels alike."""
    fake, log = hostile(JobLimits(jobs=2)), tmp_path / "job.out"
    fake._sacct = lambda *_: f"CANCELLED by {os.getuid() + other}\n"
    fake.turn()
    fake.sleep(90 - TURN_S)
    (first,) = fake.live()
    first.state, first.is_training = "COMPLETING", False
    log.write_text("x" * 2_000_000 + CANCELLED.format(first.id, reason) + "Error: killed\n" * 100)
    monkeypatch.setattr(queue, "LOG", log)
    monkeypatch.setenv("SLURM_JOB_ID", first.id)
    fake.now += 60.0
    fake.later(30, lambda: fake.end(first, "PREEMPTED" if reason else "CANCELLED"))
    turns.end_job(fake.directory, first.number, 90, 143)
    assert len(fake.requests) == requests
    fake.sleep(HOUR / 6)
    assert any(job.is_training for job in fake.live()) == (requests == 2)


def test_after_a_cancelled_successor_the_job_trains_to_its_end(hostile):
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    successor.state = "CANCELLED"
    fake.sleep(2 * HOUR)
    assert (first.state, len(fake.requests), fake.live()) == ("COMPLETED", 2, [])
    assert fake.steps > 40


def test_a_job_that_is_cancelled_before_it_begins_ends_the_run(hostile):
    """The prolog of its nodes is slow."""
    fake = hostile(JobLimits(jobs=2))
    fake.begin = lambda job: None
    fake.turn()
    fake.sleep(30)
    (job,) = fake.live()
    assert job.started
    fake.end(job, "CANCELLED")
    fake.sleep(HOUR)
    assert f"job {job.id} was cancelled" in fake.turn() and len(fake.requests) == 1


def test_the_user_may_cancel_a_job_without_a_record(hostile):
    fake = hostile(JobLimits(jobs=2))
    fake.lives = 7
    assert fake.turn() == "killed"
    (first,) = fake.live()
    first.state = "CANCELLED"
    assert f"job {first.id} was cancelled" in fake.turn() and len(fake.requests) == 1


def test_the_user_may_cancel_a_job_that_the_run_could_not(hostile):
    """scancel failed, and then the held job was released."""
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    successor.reason, scancel = "JobHeldAdmin", fake._scancel
    fake._scancel = no_answer
    fake.sleep(400)
    assert (fake.directory / f"{successor.number:06d}-dropped.json").exists()
    fake._scancel, successor.reason = scancel, "Priority"
    fake.end(first, "NODE_FAIL")
    fake.sleep(60)
    assert successor.is_training
    fake.end(successor, "CANCELLED")
    assert f"job {successor.id} was cancelled" in fake.turn()


def test_the_run_takes_its_own_cancellations_for_no_ones(hostile):
    """A job that an administrator holds is replaced."""
    fake = hostile(JobLimits(jobs=2))
    _, successor = two_jobs(fake)
    successor.reason = "JobHeldAdmin"
    fake.sleep(400)
    assert successor.state == "CANCELLED" and len(fake.requests) == 3
    assert not is_over(fake.directory, fake.plan)


def test_the_run_may_cancel_a_job_that_was_requeued(hostile):
    """It had begun, but waited for the ranks of the first one; its node failed, and its launch then, too."""
    fake = hostile(JobLimits(jobs=2))
    _, successor = two_jobs(fake)
    note(fake.directory, successor.number, "begun", step=0)
    fail_to_launch(successor)
    fake.sleep(400)
    assert successor.state == "CANCELLED" and len(fake.requests) == 3
    assert not is_over(fake.directory, fake.plan)


def test_a_job_that_an_administrator_cancels_is_replaced(hostile):
    """Slurm's accounting knows who it was. Until it does, the successor waits."""
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    first.canceller += 1
    answers, fake._sacct = fake._sacct, lambda *_: "RUNNING\n"
    fake.later(60, lambda: setattr(fake, "_sacct", answers))
    fake.end(first, "CANCELLED")
    before = fake.now
    fake.sleep(2)
    assert successor.is_training and before + 60 < fake.now < before + 70
    assert not is_over(fake.directory, fake.plan)


def test_without_accounting_each_cancellation_is_the_users(hostile):
    fake = hostile(JobLimits(jobs=2))
    fake.accounts = False
    first, _ = two_jobs(fake)
    first.canceller += 1
    fake.end(first, "CANCELLED")
    fake.sleep(60)
    assert f"job {first.id} was cancelled" in fake.turn()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_cancellation_is_not_forgotten_while_accounting_is_down(hostile, comes_back):
    """Slurm's queue forgets the job first. Without an answer for an hour, it was the user."""

    def refuse(*_: object) -> str:
        raise slurm.SlurmError("sacct failed: Problem talking to the database: Connection refused")

    fake = hostile(JobLimits(jobs=2))
    first, _ = two_jobs(fake)
    fake._sacct = refuse
    fake.later(300, lambda: fake.jobs.pop(first.id))
    if comes_back:
        fake.later(600, lambda: setattr(fake, "_sacct", lambda *_: f"CANCELLED by {os.getuid()}\n"))
    known = list[str]()
    fake.later(590, lambda: known.append(is_over(fake.directory, fake.plan)))
    fake.end(first, "CANCELLED")
    fake.sleep(2 * HOUR)
    assert known == [""]
    assert f"job {first.id} was cancelled" in fake.turn()
    assert len(fake.requests) == 2 and not fake.live()
