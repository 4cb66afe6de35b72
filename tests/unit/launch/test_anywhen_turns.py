"""The turns of a run beside a hostile scheduler, in virtual time: requests, successors and limits."""

import signal
from dataclasses import replace

import pytest

from launch.anywhen import turns
from launch.anywhen.decision import Size
from launch.anywhen.record import is_over, note, records, save
from rl.config.elastic import JobLimits
from tests.unit.launch.hostile_slurm import STEPS, TURN_S, HostileSlurm, two_jobs
from tests.unit.launch.queue_simulator import HOUR


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_and_no_limit_exceeded(hostile, seed):
    """Jobs and processes are killed, jobs are held at random moments, and each command fails or hangs in one
    of seven calls. The clock of the run's machines jumps by hours, but not while a late job is on its way,
    because the pause before the next request follows from this clock."""
    fake = hostile(JobLimits(jobs=2 + seed % 3, node_hours=90.0), seed, faults=0.15)

    def disturb() -> None:
        if fake.rng.random() < 0.02 and not fake.late:
            fake.ahead = fake.rng.choice([-86400.0, -3600.0, 0.0, 30.0, 3600.0])
        for job in fake.live():
            if fake.rng.random() < 0.02:
                fake.end(job, "NODE_FAIL")
            elif job.state == "PENDING" and fake.rng.random() < 0.1:
                job.reason = "JobHeldAdmin"

    fake.every(TURN_S, fake.turn, lambda: fake.steps < STEPS or bool(fake.live()))  # submit --stay
    fake.every(TURN_S, disturb, lambda: fake.steps < STEPS)
    while fake.steps < STEPS:
        assert fake.now < 200 * HOUR, fake.steps
        fake.sleep(TURN_S)
    fake.sleep(2 * HOUR)
    begun = [job.asked["nodes"] for job in records(fake.directory) if job.begun]
    print(f"{fake.now / HOUR:.1f} h, {len(fake.requests)} requests, layouts {begun}, {fake.kinds}")
    assert not fake.live() and is_over(fake.directory, fake.plan) == "the run is finished"


def test_of_two_turns_at_once_one_requests(hostile):
    fake = hostile(JobLimits())
    fake.meanwhile = [fake.turn]
    fake.turn()
    assert len(fake.requests) == 1


@pytest.mark.parametrize("lives", [5, 6, 7])
def test_a_request_whose_process_is_killed_is_made_once(hostile, lives):
    """Before it notes or makes the request, or before it notes the job, which counts by its name."""
    fake = hostile(JobLimits(jobs=2, node_hours=10.0))
    fake.lives = lives
    assert fake.turn() == "killed" and len(fake.requests) == (lives == 7)
    fake.every(TURN_S, fake.turn, lambda: True)
    fake.sleep(HOUR / 2)
    assert fake.live()[0].is_training and len(fake.requests) == 2
    assert all(job.job for job in records(fake.directory) if job.begun)


def test_a_job_that_ends_during_its_request_notes_the_successor(hostile, monkeypatch):
    """Slurm sends SIGTERM before sbatch has printed the id."""
    fake = hostile(JobLimits(jobs=2))
    fake.turn()
    fake.sleep(30)
    fake.events.clear()
    (first,), add, before = fake.live(), fake._add, signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(fake, "_add", lambda job: (add(job), signal.raise_signal(signal.SIGTERM)))
    monkeypatch.setenv("SLURM_JOB_ID", first.id)
    try:
        assert turns.main("follow", str(fake.directory), str(first.number), "30") == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [job.job for job in records(fake.directory)] == list(fake.jobs) and len(fake.jobs) == 2


@pytest.mark.parametrize("is_full", [False, True])
def test_no_job_exceeds_what_its_partition_allows(hostile, is_full):
    """By default Slurm accepts such a job, and never starts it. The limit may become lower later.

    is_full: no node is idle when the first job is requested.
    """
    fake = hostile(JobLimits())
    fake.longest_s, fake.widest, sinfo = HOUR / 2, 2, fake._sinfo
    fake._sinfo = lambda command, broken: "" if is_full and "-N" in command else sinfo(command, broken)
    first, successor = two_jobs(fake)
    assert (first.nodes, first.seconds) == (2, HOUR / 2) and successor.seconds <= HOUR / 2
    fake.longest_s, successor.reason = successor.seconds - 60, "PartitionTimeLimit"
    fake.sleep(400)
    others = [job for job in fake.live() if job is not first]
    assert successor.state == "CANCELLED" and max(job.seconds for job in others) <= fake.longest_s


@pytest.mark.parametrize("most", [1, 2])
def test_no_job_has_more_nodes_than_its_partition_allows(hostile, most):
    fake = hostile(JobLimits(jobs=4))
    fake._sinfo, fake.widest = lambda *_: "", most
    first, _ = two_jobs(fake)
    fake.sleep(300)
    before = fake.tests
    fake.sleep(600)
    assert first.nodes == most and fake.tests - before <= 30
    assert {job.reason for job in fake.jobs.values()} == {"Priority"}


def test_slurm_is_asked_about_few_of_many_sizes(hostile):
    """A job of the largest size that the partition allows waits for its turn."""
    fake = hostile(JobLimits(jobs=4))
    resubmit(fake, *range(1, 65))
    fake._sinfo, fake.widest = lambda *_: "", 6
    fake.idle = lambda: 0
    fake.turn()
    assert [job.nodes for job in fake.live()] == [6] and fake.tests <= 12
    fake.every(TURN_S, fake.turn, lambda: True)
    fake.sleep(600)
    before = fake.tests
    fake.sleep(600)
    assert [job.nodes for job in fake.live()] == [6, 1] and fake.tests - before <= 30


@pytest.mark.parametrize("is_drained", [True, False])
def test_a_job_whose_nodes_are_drained_keeps_its_place(hostile, is_drained):
    """Slurm gives a limit of the partition as the reason."""
    fake = hostile(JobLimits(jobs=2))
    _, successor = two_jobs(fake)
    successor.reason = "PartitionNodeLimit"
    fake.widest = 1 if is_drained else 0
    fake.sleep(400)
    assert successor.state == ("PENDING" if is_drained else "CANCELLED")


def test_nothing_is_requested_beyond_the_node_hours(hostile):
    fake = hostile(JobLimits(node_hours=4.0))
    fake.turn()
    fake.sleep(6 * HOUR)
    assert not fake.live() and fake.steps < STEPS
    assert fake.turn() == "run.limits.node_hours=4 allows none"


def test_a_job_that_is_killed_before_it_begins_uses_its_node_hours(hostile):
    """Nobody knows how long it ran."""
    fake = hostile(JobLimits(node_hours=8.0))
    fake.begin = lambda job: None
    fake.turn()
    fake.sleep(30)
    fake.turn()
    fake.end(fake.live()[0], "NODE_FAIL")
    assert fake.turn() == "run.limits.node_hours=8 allows none"


def test_a_job_that_only_waited_uses_no_node_hours(hostile):
    """The user cancelled it; the queue has forgotten it."""
    fake = hostile(JobLimits(node_hours=8.0))
    fake.idle = lambda: 0
    fake.turn()
    fake.sleep(HOUR)
    (job,) = fake.jobs.values()
    fake.jobs.clear()
    assert fake.turn() == "" and [new.nodes for new in fake.live()] == [job.nodes]


def test_a_job_that_starts_while_it_is_cancelled_keeps_its_place(hostile):
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    successor.reason = "JobHeldAdmin"
    fake.events.clear()
    fake.now += 400.0
    fake.meanwhile = [lambda: fake.start(successor)]
    assert "has started" in fake.turn(first.id)
    assert len(fake.requests) == 2


def resubmit(fake: HostileSlurm, *nodes: int) -> None:
    """Write the plan of a second submission with other sizes."""
    save(replace(fake.plan, sizes=[Size(n, 480.0 / n) for n in nodes]), fake.directory, "")


def test_a_successor_whose_size_the_new_plan_lacks_is_replaced(hostile):
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    assert (first.nodes, successor.nodes) == (4, 1)
    resubmit(fake, 2, 4)
    fake.sleep(300)
    new = fake.live()[-1]
    assert (successor.state, new.nodes, new.after) == ("CANCELLED", 2, first.id)


def test_a_job_that_leaves_requests_another_if_none_trains(hostile):
    """The new plan lacks its size, and the training job was killed."""
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    resubmit(fake, 2, 4)
    fake.end(first, "NODE_FAIL")
    fake.sleep(600)
    (new,) = [job for job in fake.live() if job.is_training]
    assert successor.state == "COMPLETED" and new.nodes in (2, 4)


def test_a_job_that_is_requeued_while_it_leaves_requests_another(hostile):
    fake = hostile(JobLimits(jobs=2))
    fake.turn()
    note(fake.directory, 1, "begun", step=0)
    note(fake.directory, 1, "ended", code=3, seconds=10.0, step_s=0.0)
    fake.sleep(600)
    first, second, *_ = fake.jobs.values()
    assert (first.state, second.is_training) == ("COMPLETED", True)


@pytest.mark.parametrize(
    ("is_noted", "state", "busy", "waits_s"),
    [
        (True, "COMPLETING", "", 0),  # a node does not come back
        (True, "RUNNING", "is_training", 30),  # somebody sent SIGTERM to its processes, and the ranks save
        (False, "COMPLETING", "has_steps", 30),  # the batch script was killed before it noted the end
    ],
)
def test_a_new_job_waits_for_ranks_and_not_for_nodes(hostile, is_noted, state, busy, waits_s):
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    if is_noted:
        fake.monkeypatch.setenv("SLURM_JOB_ID", first.id)
        turns.end_job(fake.directory, first.number, 90, 0)
    first.state, first.is_training, first.has_steps = state, busy == "is_training", busy == "has_steps"
    fake.later(30, lambda: setattr(first, busy or "has_steps", False))
    fake.start(successor)
    before = fake.now
    fake.begin(successor)
    assert successor.is_training and waits_s - 5 < fake.now - before < waits_s + 10


def test_a_job_that_waited_too_long_requests_another(hostile):
    """It does not know whether the ranks of the first one have ended."""
    fake = hostile(JobLimits())
    first, successor = two_jobs(fake)
    first.state, first.is_training, first.has_steps = "COMPLETING", False, True
    fake.start(successor)
    before = len(fake.requests)
    fake.begin(successor)
    assert successor.state == "COMPLETED" and len(fake.requests) == before + 1


def test_a_job_that_ends_is_no_successor(hostile):
    fake = hostile(JobLimits())
    first, successor = two_jobs(fake)
    fake.start(successor)
    successor.state, before = "COMPLETING", len(fake.requests)
    fake.end_ranks(first, 75)
    assert len(fake.requests) == before + 1


def test_an_ending_job_waits_for_the_pause_after_refused_requests(hostile):
    fake = hostile(JobLimits(jobs=2))
    fake.turn()
    fake.sleep(30)
    (first,) = fake.live()
    for number in (2, 3, 4):
        note(fake.directory, number, "asked", nodes=1, seconds=600.0, partition="", after="")
    fake.end_ranks(first, 75)
    assert len(fake.requests) == 2


def test_a_follower_tells_that_it_noted_no_end(hostile, monkeypatch):
    """The user may remove the file stop before the job ends."""
    fake = hostile(JobLimits(jobs=2))
    first, _ = two_jobs(fake)
    monkeypatch.setenv("SLURM_JOB_ID", first.id)
    monkeypatch.setattr(turns.signal, "signal", lambda *_: None)
    (fake.directory / "stop").write_text("the user's")
    assert turns.main("follow", str(fake.directory), str(first.number), "0") == turns.FOLLOWED
    assert not any(job.ended for job in records(fake.directory))
