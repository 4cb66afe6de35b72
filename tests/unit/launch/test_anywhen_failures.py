"""Jobs of a run that fail or are held, and a Slurm, disks and clocks that fail, in virtual time."""

import errno
import os

import pytest

from launch.anywhen import queue, turns
from launch.anywhen.record import has_failed, is_over, note
from rl.config.elastic import JobLimits
from tests.unit.launch.hostile_slurm import TURN_S, fail_to_launch, no_answer, two_jobs
from tests.unit.launch.queue_simulator import HOUR


def test_a_job_whose_launch_failed_is_replaced_until_three_failed(hostile):
    """Slurm requeues a job whose prolog failed, and holds it."""
    fake = hostile(JobLimits(jobs=2))
    fake.begin = fail_to_launch
    fake.every(TURN_S, fake.turn, lambda: True)
    fake.sleep(3 * HOUR)
    assert "3 jobs failed without a newer checkpoint" in fake.turn()
    assert len(fake.requests) == 3 and not fake.live()


def test_failed_launches_beside_a_job_that_trains_stop_nothing(hostile):
    """Nor does their sum with those after it: it brought a checkpoint."""
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    step, fake.speed = fake.steps, 0.0
    for _ in range(3):
        fail_to_launch(fake.live()[-1])
        fake.sleep(900)
    assert first.is_training and int(fake.steps) == int(step) and len(fake.requests) >= 5
    assert not is_over(fake.directory, fake.plan)
    fake.speed = 1.0
    fake.sleep(90)
    fake.end(first, "NODE_FAIL")
    fake.sleep(60)
    assert [job.is_training for job in fake.live()[:1]] == [True]


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_job_waits_until_the_one_before_it_is_launched(hostile, is_launched):
    """If it left, nobody would replace the one whose launch fails then. It ends no job that it
    does not replace."""
    fake = hostile(JobLimits(jobs=2))
    fake.begin, begin = lambda job: None, fake.begin
    fake.turn()
    fake.sleep(90)
    fake.turn()
    first, second = fake.live()
    fake.later(60, (lambda: begin(first)) if is_launched else (lambda: fail_to_launch(first)))
    fake.start(second)
    begin(second)
    fake.sleep(60)
    trainer, other = (first, second) if is_launched else (second, first)
    assert trainer.is_training and other.state == ("COMPLETED" if is_launched else "CANCELLED")


def test_failures_count_in_the_order_of_their_ends(hostile):
    """The first job trained until a new checkpoint, after the second one and the third one had failed."""
    fake = hostile(JobLimits())
    for number, ended, code in ((1, 40, 75), (2, 20, 1), (3, 30, 1), (4, 50, 1)):
        fake.now = ended
        note(fake.directory, number, "asked", nodes=1, seconds=600.0)
        note(fake.directory, number, "begun", step=0)
        note(fake.directory, number, "ended", code=code, seconds=10.0, step_s=0.0)
    assert not has_failed(fake.directory)
    for number, ended in ((5, 60), (6, 70)):
        fake.now = ended
        note(fake.directory, number, "asked", nodes=1, seconds=600.0)
        note(fake.directory, number, "begun", step=0)
        note(fake.directory, number, "ended", code=1, seconds=10.0, step_s=0.0)
    assert has_failed(fake.directory)


def test_jobs_that_fail_end_the_run_until_the_file_is_removed(hostile):
    fake = hostile(JobLimits(jobs=2))
    fake.speed = 0.0
    fake.every(TURN_S, lambda: [fake.end_ranks(job, 1) for job in fake.live()], lambda: True)
    fake.turn()
    fake.sleep(HOUR)
    assert "failed without a newer checkpoint" in fake.turn() and len(fake.requests) < 6
    (fake.directory / "stop").unlink()
    before = len(fake.requests)
    fake.turn()
    fake.sleep(HOUR)
    assert 3 <= len(fake.requests) - before < 6


def test_a_state_of_a_newer_slurm_that_waits_holds_the_job(hostile):
    fake = hostile(JobLimits(jobs=2))
    _, successor = two_jobs(fake)
    for state in ("RESV_DEL_HOLD", "NEWER"):
        successor.state = state
        assert [bool(job.held) for job in queue.jobs_of(fake.plan)[0]] == [False, True]


@pytest.mark.parametrize("ahead", [-1e7, 1e7])
def test_a_clock_that_was_wrong_stops_nothing(hostile, ahead):
    fake = hostile(JobLimits())
    fake.ahead = ahead
    fake.turn()
    fake.ahead = 0.0
    fake.sleep(120)
    assert len(fake.requests) > 1


def test_a_full_disk_loses_nothing(hostile, monkeypatch):
    """Neither a first request, nor a job that begins or ends. No file is left there."""
    fake, well = hostile(JobLimits(jobs=2)), os.fsync

    def fill(seconds: float) -> None:
        monkeypatch.setattr(os, "fsync", refuse)
        fake.later(seconds, lambda: monkeypatch.setattr(os, "fsync", well))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fill(30)
    assert turns.follow(fake.directory, turns=2) == "" and len(fake.requests) == 1
    fake.sleep(90)
    for end in (lambda job: fake.end(job, "NODE_FAIL"), lambda job: fake.end_ranks(job, 75)):
        (first,) = [job for job in fake.live() if job.is_training]
        fill(900)
        end(first)
        fake.sleep(1200)
        assert any(job.is_training for job in fake.live()) and not first.is_live
    assert {path.suffix for path in fake.directory.iterdir()} == {".json"}


def test_successors_are_requested_while_sinfo_does_not_answer(hostile):
    fake = hostile(JobLimits(jobs=2))
    fake._sinfo = no_answer
    first, successor = two_jobs(fake)
    fake.end(first, "NODE_FAIL")
    fake.sleep(90)
    assert successor.is_training and len(fake.requests) == 3


def test_successors_are_requested_while_slurm_tests_no_request(hostile):
    fake = hostile(JobLimits(jobs=2))
    fake.answers = False
    fake.turn()
    fake.sleep(300)
    first, successor = fake.live()
    assert first.is_training and first.nodes == 4 and successor.after == first.id


def test_a_job_that_could_not_look_at_the_queue_requests_another(hostile):
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    answers, fake._squeue = fake._squeue, no_answer
    fake.later(turns.LONGEST_WAIT_S + 60, lambda: setattr(fake, "_squeue", answers))
    fake.end(first, "NODE_FAIL")
    fake.sleep(turns.LONGEST_WAIT_S + 600)
    assert successor.state == "COMPLETED" and [job.is_training for job in fake.live()[:1]] == [True]


def test_an_ending_job_waits_for_slurms_answer(hostile):
    """Without it nobody can use the nodes."""
    fake = hostile(JobLimits(jobs=2))
    fake.turn()
    fake.sleep(30)
    (first,) = fake.live()
    answers, fake._squeue = fake._squeue, no_answer
    fake.later(HOUR / 2, lambda: setattr(fake, "_squeue", answers))
    fake.end_ranks(first, 75)
    assert len(fake.requests) == 2 and HOUR / 2 < fake.now < HOUR / 2 + 300
