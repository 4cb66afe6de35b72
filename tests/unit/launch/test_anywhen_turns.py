"""The turns of a run beside a scheduler that refuses, hangs, lies, holds and kills, in virtual time.

The processes of the run are those of its jobs and a `submit --anywhen --stay`. They call the real functions;
only Slurm's commands, the clock and the ranks are played.
"""

import heapq
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import pytest

from launch import slurm
from launch.anywhen import queue, record, turns
from launch.anywhen.decision import Plan, Size
from launch.anywhen.record import has_failed, is_over, load, note, records, save
from rl.config.elastic import JobLimits
from tests.unit.launch.test_anywhen import HOUR

NODES, STEPS, TURN_S, LATE_S = 8, 60, 60.0, 180.0
START = 1.8e9
BROKEN = ["garbage", "a|b", "x|RUNNING|many|1:00|2026-11-30T00:00:00|None|(null)|{name}-1"]


class Killed(BaseException):
    pass


@dataclass
class FakeJob:
    id: str
    name: str
    nodes: int
    seconds: float
    after: str
    state: str = "PENDING"
    ended: float = 0.0
    reason: str = "Priority"
    started: float = 0.0
    is_training: bool = False
    has_steps: bool = False
    """Whether Slurm still lists a step of a job whose ranks have ended, as after a failure of the node."""
    canceller: int = field(default_factory=os.getuid)

    @property
    def number(self) -> int:
        return int(self.name.rpartition("-")[2])

    @property
    def is_live(self) -> bool:
        return self.state in ("PENDING", "RUNNING", "COMPLETING")


class HostileSlurm:
    """Slurm's commands and clock. faults: probability that a command misbehaves."""

    def __init__(self, directory: Path, limits: JobLimits, seed: int = 0, faults: float = 0.0):
        self.directory, self.limits = directory / "anywhen", limits
        self.rng, self.faults = random.Random(seed), faults
        self.now = self.ahead = 0.0
        self.events: list[tuple[float, int, Callable[[], object]]] = []
        self.count = itertools.count(1)
        self.jobs: dict[str, FakeJob] = {}
        self.requests: list[float] = []
        self.meanwhile: list[Callable[[], object]] = []
        """Actions of a user or of Slurm that happen right after the next look at the queue."""
        self.steps, self.speed = 0.0, 1.0
        self.kills = False
        """Whether the process that requests a job is killed before it notes the id."""
        self.accounts = True
        self.kinds = Counter[str]()
        sizes = [Size(nodes, 480.0 / nodes) for nodes in (1, 2, 4)]
        times = dict(start_s=60.0, lead_s=60.0, turn_s=TURN_S)
        file = directory / "anywhen.sbatch"
        save(
            Plan(sizes, limits, 2 * HOUR, max_steps=STEPS, name="run-1", file=str(file), **times),
            self.directory,
            "",
        )
        self.plan = load(self.directory)

    # The clock ----------------------------------------------------------------------------------------------

    def time(self) -> float:
        return START + self.now + self.ahead

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let everything else happen that is due in the meantime."""
        end = self.now + seconds
        while self.events and self.events[0][0] <= end:
            at, _, act = heapq.heappop(self.events)
            self._pass(at)
            act()
        self._pass(end)

    def _pass(self, now: float) -> None:
        passed, self.now = max(0.0, now - self.now), max(now, self.now)
        for job in self.jobs.values():
            if job.is_training:
                self.steps = min(STEPS, self.steps + self.speed * passed * job.nodes / 480.0)
        if passed and not any(job.is_training for job in self.jobs.values()):
            return
        state = "finished" if self.steps >= STEPS else "running"
        status = {"state": state, "checkpoint_step": int(self.steps), "max_steps": STEPS}
        (self.directory.parent / "status.json").write_text(json.dumps(status))

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.count), act))

    def every(self, seconds: float, act: Callable[[], object], while_: Callable[[], bool]) -> None:
        def again() -> None:
            if while_():
                act()
                self.every(seconds, act, while_)

        self.later(seconds, again)

    # Slurm --------------------------------------------------------------------------------------------------

    def live(self) -> list[FakeJob]:
        return [job for job in self.jobs.values() if job.is_live]

    def run(self, *command: str, given: str | None = None) -> str:
        self.sleep(0.2)
        if command[0] == "sinfo" and self.meanwhile:
            self.meanwhile.pop()()
        broken = self.rng.random() < self.faults
        act = {"sbatch": self._sbatch, "scancel": self._scancel, "squeue": self._squeue, "sinfo": self._sinfo}
        act |= {"sacct": self._sacct}
        if command[0] == "sbatch" and "--test-only" not in command:
            return self._sbatch(command, broken)
        if broken and (self.rng.random() < 0.5 or command[0] == "scancel"):
            self.sleep(60)
            raise slurm.NoAnswer(f"{command[0]} did not answer")
        if broken:
            return self.rng.choice(BROKEN).format(name=self.plan.name) + "\n"
        return act[command[0]](command, False)

    def _sbatch(self, command: tuple[str, ...], broken: bool) -> str:
        if "--test-only" in command:
            return ""
        assert all(self.now - at >= TURN_S - 1 for at in self.requests[-1:]), "a storm of requests"
        self.requests.append(self.now)
        words = dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)
        after = words.get("dependency", "").rpartition(":")[2]
        size = int(words["nodes"]), 60.0 * int(words["time"])
        job = FakeJob(str(100 + len(self.requests)), words["job-name"], *size, after)
        kind = self.rng.choice(["refuse", "hang", "late", "garbage", "banner"]) if broken else ""
        self.kinds[kind] += 1
        if kind == "refuse":
            raise slurm.SlurmError("sbatch failed: Invalid account")
        if kind in ("hang", "late"):
            self.sleep(60)
            if kind == "late":
                self.later(self.rng.uniform(0, LATE_S - 60), lambda: self._add(job))
            raise slurm.NoAnswer("sbatch did not answer")
        self._add(job)
        if self.kills:
            raise Killed
        return {"garbage": "Submitted!\n", "banner": f"welcome\n{job.id}\n"}.get(kind, f"{job.id}\n")

    def _add(self, job: FakeJob) -> None:
        self.jobs[job.id] = job
        self.check_limits()
        self.later(1.0, self.schedule)

    def check_limits(self) -> None:
        live = self.live()
        assert len(live) <= self.limits.jobs, live
        done = [job for job in self.jobs.values() if not job.is_live and job.started]
        used = sum(
            job.nodes * (job.seconds if job.state == "NODE_FAIL" else job.ended - job.started) for job in done
        )
        booked = used + sum(job.nodes * job.seconds for job in live)
        assert not self.limits.node_hours or booked <= self.limits.node_hours * HOUR + 1

    def _squeue(self, command: tuple[str, ...], broken: bool) -> str:
        if "-s" in command:
            job = self.jobs[command[4]]
            return (
                f"{job.id}.extern\n"
                + f"{job.id}.batch\n" * (job.state == "RUNNING")
                + f"{job.id}.0\n" * (job.is_training or job.has_steps)
            )
        if "--me" not in command:
            return ""
        return "".join(
            f"{job.id}|{job.state}|{job.nodes}|{int(job.seconds // 60)}:00|{self._text(job)}|{job.reason}|"
            f"{f'afterany:{job.after}(unfulfilled)' if self._waits_for(job) else '(null)'}|{job.name}\n"
            for job in self.jobs.values()
        )

    @staticmethod
    def _text(job: FakeJob) -> str:
        return datetime.fromtimestamp(START + job.started).isoformat()[:19] if job.started else "N/A"

    def _waits_for(self, job: FakeJob) -> bool:
        return job.after in self.jobs and self.jobs[job.after].is_live

    def _sinfo(self, command: tuple[str, ...], broken: bool) -> str:
        return "".join(f"main*|node{n}\n" for n in range(self.idle()))

    def _sacct(self, command: tuple[str, ...], broken: bool) -> str:
        if not self.accounts:
            raise slurm.SlurmError("Slurm accounting storage is disabled")
        job = self.jobs[command[5]]
        return f"CANCELLED by {job.canceller}\n" if job.state == "CANCELLED" else f"{job.state}\n"

    def idle(self) -> int:
        return NODES - sum(job.nodes for job in self.live() if job.state != "PENDING")

    def _scancel(self, command: tuple[str, ...], broken: bool) -> str:
        for job in (self.jobs[word] for word in command[2:]):
            if command[1] == "--state=PENDING" and job.state == "PENDING":
                job.state = "CANCELLED"
            elif command[1] == "--signal=USR2" and job.is_training:
                self.later(5.0, lambda job=job: self.end_ranks(job, 75))
        return ""

    def schedule(self) -> None:
        for job in self.live():
            free = (
                job.state == "PENDING" and not job.reason.startswith("JobHeld") and not self._waits_for(job)
            )
            if free and job.nodes <= self.idle():
                self.start(job)
                self.later(job.seconds - 60.0, lambda job=job: self.end_ranks(job, 75))
                self.later(job.seconds, lambda job=job: self.end(job, "TIMEOUT"))
                self.later(0.5, lambda job=job: self.begin(job))

    def start(self, job: FakeJob) -> None:
        job.state, job.started = "RUNNING", self.now

    # A job --------------------------------------------------------------------------------------------------

    def begin(self, job: FakeJob) -> None:
        self.monkeypatch.setenv("SLURM_JOB_ID", job.id)
        if turns.start_job(self.directory, job.number, 0) or job.state != "RUNNING":
            return self.end(job, "COMPLETED")
        assert not any(other.is_training for other in self.live()), "two jobs train"
        job.is_training = True
        self.every(TURN_S, lambda: self.turn(job.id), lambda: job.is_training and job.state == "RUNNING")

    def turn(self, own: str = "") -> str:
        try:
            return turns.turn(self.directory, own=own)
        except turns.PASSING as error:
            return f"error: {error}"

    def end_ranks(self, job: FakeJob, code: int) -> None:
        if job.is_training and job.state == "RUNNING":
            job.is_training = False
            self.monkeypatch.setenv("SLURM_JOB_ID", job.id)
            turns.end_job(self.directory, job.number, int(self.now - job.started), code)
            self.later(3.0, lambda: self.end(job, "COMPLETED"))

    def end(self, job: FakeJob, state: str) -> None:
        if job.is_live:
            job.state, job.is_training, job.ended = state, False, self.now
            self.later(1.0, self.schedule)


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Return a function that makes a HostileSlurm, whose commands and clock the run then has."""

    def make(*arguments, **values) -> HostileSlurm:
        (tmp_path / "launch").mkdir()
        fake = HostileSlurm(tmp_path, *arguments, **values)
        fake.monkeypatch = monkeypatch
        monkeypatch.setattr(slurm, "run", fake.run)
        monkeypatch.setattr(record.os, "fsync", lambda file: None)
        for module in (turns, queue, record):
            monkeypatch.setattr(module, "time", fake)
        return fake

    return make


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_and_no_limit_exceeded(hostile, seed):
    """Jobs are killed and held at random moments, and each command fails or hangs in one of seven calls. The
    clock of the run's machines jumps by hours."""
    fake = hostile(JobLimits(jobs=2 + seed % 3, node_hours=60.0), seed, faults=0.15)

    def disturb() -> None:
        if fake.rng.random() < 0.02:
            fake.ahead = fake.rng.choice([-86400.0, -3600.0, 0.0, 30.0, 3600.0])
        for job in fake.live():
            if fake.rng.random() < 0.02:
                fake.end(job, "NODE_FAIL")
            elif job.state == "PENDING" and fake.rng.random() < 0.1:
                job.reason = "JobHeldAdmin"

    fake.every(TURN_S, fake.turn, lambda: fake.steps < STEPS)  # submit --stay
    fake.every(TURN_S, disturb, lambda: fake.steps < STEPS)
    while fake.steps < STEPS:
        assert fake.now < 200 * HOUR, fake.steps
        fake.sleep(TURN_S)
    fake.sleep(2 * HOUR)
    begun = [job.asked["nodes"] for job in records(fake.directory) if job.begun]
    print(f"{fake.now / HOUR:.1f} h, {len(fake.requests)} requests, layouts {begun}, {fake.kinds}")
    assert not fake.live() and is_over(fake.directory, fake.plan) == "the run is finished"


def two_jobs(fake: HostileSlurm) -> tuple[FakeJob, FakeJob]:
    """Return a job that trains, and its successor."""
    fake.turn()
    fake.sleep(90)
    first, successor = fake.live()
    assert first.is_training and successor.after == first.id
    return first, successor


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
    ("reason", "other", "requests"), [("", 0, 1), ("", 1, 2), (" DUE TO PREEMPTION", 0, 2)]
)
def test_only_a_job_that_is_being_cancelled_requests_no_other(hostile, reason, other, requests):
    """Slurm ends a job that it pre-empts, or that an administrator cancels, in the same way."""
    fake = hostile(JobLimits(jobs=2))
    fake._sacct = lambda *_: f"CANCELLED by {os.getuid() + other}\n"
    fake.turn()
    fake.sleep(90 - TURN_S)
    (first,) = fake.live()
    first.state, first.is_training = "COMPLETING", False
    log = Path(fake.plan.file).parent / f"{first.name}-{first.id}.out"
    log.write_text("x" * 2_000_000 + CANCELLED.format(first.id, reason) + "Error: killed\n" * 100)
    fake.now += 60.0
    fake.later(30, lambda: fake.end(first, "PREEMPTED" if reason else "CANCELLED"))
    turns.end_job(fake.directory, first.number, 90, 143)
    assert len(fake.requests) == requests
    fake.sleep(HOUR / 6)
    assert any(job.is_training for job in fake.live()) == (requests == 2)


def test_a_job_is_being_cancelled_with_a_log_elsewhere(hostile, monkeypatch, tmp_path):
    """sbatch was given another --output; the process that asks writes there, too."""
    fake, log = hostile(JobLimits()), tmp_path / "other.out"
    monkeypatch.setattr(queue, "STDERR", log)
    assert not queue.is_cancelled(fake.plan, 1, "101")
    log.write_text(CANCELLED.format("101", ""))
    assert queue.is_cancelled(fake.plan, 1, "101") and not queue.is_cancelled(fake.plan, 1, "10")


def test_after_a_cancelled_successor_the_job_trains_to_its_end(hostile):
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    successor.state = "CANCELLED"
    fake.sleep(2 * HOUR)
    assert (first.state, len(fake.requests), fake.live()) == ("COMPLETED", 2, [])
    assert fake.steps > 40


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


def test_of_two_turns_at_once_one_requests(hostile):
    fake = hostile(JobLimits())
    fake.meanwhile = [fake.turn]
    fake.turn()
    assert len(fake.requests) == 1


def test_a_job_without_a_record_counts(hostile):
    fake = hostile(JobLimits(jobs=2, node_hours=10.0))
    fake.kills = True
    with pytest.raises(Killed):
        turns.turn(fake.directory)
    fake.kills = False
    fake.sleep(90)
    (first, successor), found = fake.live(), records(fake.directory)
    assert first.is_training and [job.job for job in found] == ["", successor.id]


def test_the_user_may_cancel_a_job_without_a_record(hostile):
    fake = hostile(JobLimits(jobs=2))
    fake.kills = True
    with pytest.raises(Killed):
        turns.turn(fake.directory)
    fake.kills = False
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


def fail_to_launch(job: FakeJob) -> None:
    job.state, job.reason, job.started = "PENDING", "launch failed requeued held", 0.0


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


def test_a_state_of_a_newer_slurm_that_waits_holds_the_job(hostile):
    fake = hostile(JobLimits(jobs=2))
    _, successor = two_jobs(fake)
    for state in ("RESV_DEL_HOLD", "NEWER"):
        successor.state = state
        assert [bool(job.held) for job in queue.jobs_of(fake.plan)[0]] == [False, True]


def test_a_job_that_starts_while_it_is_cancelled_keeps_its_place(hostile):
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    successor.reason = "JobHeldAdmin"
    fake.events.clear()
    fake.now += 400.0
    fake.meanwhile = [lambda: fake.start(successor)]
    assert "has started" in fake.turn(first.id)
    assert len(fake.requests) == 2


@pytest.mark.parametrize("ahead", [-1e7, 1e7])
def test_a_clock_that_was_wrong_stops_nothing(hostile, ahead):
    fake = hostile(JobLimits())
    fake.ahead = ahead
    fake.turn()
    fake.ahead = 0.0
    fake.sleep(120)
    assert len(fake.requests) > 1


def test_nothing_is_requested_beyond_the_node_hours(hostile):
    fake = hostile(JobLimits(node_hours=4.0))
    fake.turn()
    fake.sleep(6 * HOUR)
    assert not fake.live() and fake.steps < STEPS
    assert fake.turn() == "run.limits.node_hours=4 allows none"


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


def resubmit(fake: HostileSlurm, *nodes: int) -> None:
    """Write the plan of a second submission with other sizes."""
    save(replace(fake.plan, sizes=[Size(n, 480.0 / n) for n in nodes]), fake.directory, "")


def no_answer(*_: object) -> str:
    raise slurm.NoAnswer("no answer")


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


def test_an_ending_job_waits_for_the_pause_after_refused_requests(hostile):
    fake = hostile(JobLimits(jobs=2))
    fake.turn()
    fake.sleep(30)
    (first,) = fake.live()
    for number in (2, 3, 4):
        note(fake.directory, number, "asked", nodes=1, seconds=600.0, partition="", after="")
    fake.end_ranks(first, 75)
    assert len(fake.requests) == 2


def test_a_node_that_does_not_come_back_delays_nobody_after_the_ranks(hostile):
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    turns.end_job(fake.directory, first.number, 90, 75)
    first.state, first.is_training, before = "COMPLETING", False, fake.now
    fake.start(successor)
    fake.begin(successor)
    assert successor.is_training and fake.now < before + 10


def test_a_job_waits_for_ranks_that_save_after_a_signal(hostile):
    """Somebody sent SIGTERM to a job's processes, of which one noted the end of its ranks."""
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    turns.end_job(fake.directory, first.number, 90, 0)
    fake.later(30, lambda: setattr(first, "is_training", False))
    fake.start(successor)
    before = fake.now
    fake.begin(successor)
    assert successor.is_training and before + 25 < fake.now < before + 40


def test_a_job_that_waited_too_long_requests_another(hostile):
    """It does not know whether the ranks of the first one have ended."""
    fake = hostile(JobLimits())
    first, successor = two_jobs(fake)
    first.state, first.is_training, first.has_steps = "COMPLETING", False, True
    fake.start(successor)
    before = len(fake.requests)
    fake.begin(successor)
    assert successor.state == "COMPLETED" and len(fake.requests) == before + 1


def test_a_job_that_is_requeued_while_it_leaves_requests_another(hostile):
    fake = hostile(JobLimits(jobs=2))
    fake.turn()
    note(fake.directory, 1, "begun", step=0)
    note(fake.directory, 1, "ended", code=3, seconds=10.0, step_s=0.0)
    fake.sleep(600)
    first, second, *_ = fake.jobs.values()
    assert (first.state, second.is_training) == ("COMPLETED", True)


def test_a_job_whose_epilog_hangs_delays_nobody(hostile):
    """Its batch script was killed before it noted the end, but Slurm lists none of its steps any more."""
    fake = hostile(JobLimits())
    first, successor = two_jobs(fake)
    first.state, first.is_training, first.has_steps = "COMPLETING", False, True
    fake.start(successor)
    fake.later(30, lambda: setattr(first, "has_steps", False))
    before = fake.now
    fake.begin(successor)
    assert successor.is_training and before + 25 < fake.now < before + 40


def test_a_job_that_ends_is_no_successor(hostile):
    fake = hostile(JobLimits())
    first, successor = two_jobs(fake)
    fake.start(successor)
    successor.state, before = "COMPLETING", len(fake.requests)
    fake.end_ranks(first, 75)
    assert len(fake.requests) == before + 1


def test_a_job_starts_while_sinfo_does_not_answer(hostile):
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    fake._sinfo = no_answer
    fake.end(first, "NODE_FAIL")
    fake.sleep(60)
    assert successor.is_training


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


def test_a_job_at_its_time_limit_requests_a_successor(hostile):
    """Nobody cancelled it, although Slurm ends it in the same way."""
    fake = hostile(JobLimits(jobs=2))
    fake.turn()
    fake.sleep(30)
    (first,) = fake.live()
    fake.events.clear()
    fake.now += first.seconds
    first.state, first.is_training = "COMPLETING", False
    turns.end_job(fake.directory, first.number, int(first.seconds), 143)
    assert len(fake.requests) == 2


def test_a_disk_that_fails_once_ends_nothing(hostile, monkeypatch):
    fake, failures = hostile(JobLimits(jobs=2)), [OSError("stale handle")]

    def failing(directory: Path) -> Plan:
        if failures:
            raise failures.pop()
        return load(directory)

    monkeypatch.setattr(record, "load", failing)
    assert turns.follow(fake.directory, turns=2) == "" and len(fake.requests) == 1
    fake.sleep(30)
    (first,) = fake.live()
    failures.append(OSError("stale handle"))
    fake.end_ranks(first, 75)
    assert len(fake.requests) == 2


def test_a_run_of_an_older_version_continues(hostile, monkeypatch):
    """Its events have other names, and its batch file gives the follower no numbers."""
    fake = hostile(JobLimits(jobs=2))
    first, successor = two_jobs(fake)
    for path in fake.directory.glob("*-submitted.json"):
        path.rename(path.with_name(path.name.replace("submitted", "job")))
    note(fake.directory, first.number, "unknown")
    assert [job.job for job in records(fake.directory)] == [first.id, successor.id]
    monkeypatch.setenv("SLURM_JOB_ID", first.id)
    (fake.directory / "stop").write_text("the user's")
    assert turns.main("follow", str(fake.directory)) == 0 and successor.state == "CANCELLED"


def test_a_follower_tells_that_it_noted_no_end(hostile, monkeypatch):
    """The user may remove the file stop before the job ends."""
    fake = hostile(JobLimits(jobs=2))
    first, _ = two_jobs(fake)
    monkeypatch.setenv("SLURM_JOB_ID", first.id)
    monkeypatch.setattr(turns.signal, "signal", lambda *_: None)
    (fake.directory / "stop").write_text("the user's")
    assert turns.main("follow", str(fake.directory), str(first.number), "0") == turns.FOLLOWED
    assert not any(job.ended for job in records(fake.directory))
