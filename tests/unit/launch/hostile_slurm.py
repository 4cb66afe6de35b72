"""Slurm's commands and clock in virtual time, for the turns of a run. It refuses, hangs, lies, holds, kills.

The processes of the run are those of its jobs and a `submit --anywhen --stay`. They call the real functions;
only Slurm's commands, the clock and the ranks are played.
"""

import heapq
import itertools
import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from launch import slurm
from launch.anywhen import turns
from launch.anywhen.decision import Plan, Size
from launch.anywhen.record import load, save
from rl.config.elastic import JobLimits
from tests.unit.launch.queue_simulator import HOUR

NODES, STEPS, TURN_S, LATE_S = 8, 60, 60.0, 180.0
START = 1.8e9
OTHER = dict(i="9", T="PENDING", D=1, l="1:00", S="N/A", r="a|b\nc", E="(null)", j="\n1|RUNNING|1\x1e\u2028")
"""Another job of the user, with any reason and name."""
BROKEN = OTHER | dict(T="RUNNING", D="many", S="2026-11-30T00:00:00", P="x", N="x", Y="x")


class Killed(BaseException):
    """Raised in a process of the run that is killed."""


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
        self.now = self.ahead = self.ahead_then = 0.0  # ahead_then: at the last request
        self.late: FakeJob | None = None
        """A job that Slurm makes after it did not answer the request."""
        self.events: list[tuple[float, int, Callable[[], object]]] = []
        self.count = itertools.count(1)
        self.jobs: dict[str, FakeJob] = {}
        self.requests: list[float] = []
        self.meanwhile: list[Callable[[], object]] = []
        """Actions of a user or of Slurm that happen right after the next look at the queue."""
        self.steps, self.speed = 0.0, 1.0
        self.lives = math.inf
        """Number of calls of Slurm and notes after which the process that makes the next one is killed."""
        self.longest_s, self.widest = math.inf, NODES
        """Maximum time limit and number of nodes of the partition; Slurm accepts a job with more, and never
        starts it."""
        self.answers, self.tests = True, 0
        """Whether `sbatch --test-only` answers, and how many times it was called."""
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
        """Let everything else happen that is due in the meantime, in other processes."""
        end, own = self.now + seconds, os.environ.get("SLURM_JOB_ID", "")
        while self.events and self.events[0][0] <= end:
            at, _, act = heapq.heappop(self.events)
            self._pass(at)
            act()
        self.monkeypatch.setenv("SLURM_JOB_ID", own)
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

    def act(self) -> None:
        """Kill the process of the run that acts, if it is its time."""
        self.lives -= 1
        if self.lives < 0 or self.rng.random() < self.faults / 20:
            self.lives = math.inf
            raise Killed

    # Slurm --------------------------------------------------------------------------------------------------

    def live(self) -> list[FakeJob]:
        return [job for job in self.jobs.values() if job.is_live]

    def run(self, *command: str, given: str | None = None) -> str:
        self.act()
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
            row = BROKEN | dict(j=f"{self.plan.name}-1")
            return self.rng.choice(["garbage\n", "a|b\n", self._print(command, [row])])
        return act[command[0]](command, False)

    def _sbatch(self, command: tuple[str, ...], broken: bool) -> str:
        words = dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)
        size = int(words["nodes"]), 60.0 * int(words["time"])
        if "--test-only" in command:
            self.tests += 1
            if not self.answers:
                self.sleep(60)
                raise slurm.NoAnswer("sbatch did not answer")
            if size[0] > self.widest:
                raise slurm.SlurmError("allocation failure: Requested node configuration is not available")
            return ""
        pauses = [self.now - at for at in self.requests[-1:] if self.ahead == self.ahead_then]
        assert all(pause >= TURN_S - 1 for pause in pauses), "a storm of requests"
        self.requests.append(self.now)
        self.ahead_then = self.ahead
        after = words.get("dependency", "").rpartition(":")[2]
        job = FakeJob(str(100 + len(self.requests)), words["job-name"], *size, after)
        kind = self.rng.choice(["refuse", "hang", "late", "garbage", "banner"]) if broken else ""
        self.kinds[kind] += 1
        if kind == "refuse":
            raise slurm.SlurmError("sbatch failed: Invalid account")
        if kind in ("hang", "late"):
            self.sleep(60)
            if kind == "late":
                self.late = job
                self.later(self.rng.uniform(0, LATE_S - 60), lambda: self._add(job))
            raise slurm.NoAnswer("sbatch did not answer")
        self._add(job)
        return {"garbage": "Submitted!\n", "banner": f"welcome\n{job.id}\n"}.get(kind, f"{job.id}\n")

    def _add(self, job: FakeJob) -> None:
        self.jobs[job.id], self.late = job, None
        if job.seconds > self.longest_s or job.nodes > self.widest:
            job.reason = f"Partition{'Time' if job.seconds > self.longest_s else 'Node'}Limit"
        self.check_limits()
        self.later(1.0, self.schedule)

    def check_limits(self) -> None:
        live = self.live()
        assert len(live) <= self.limits.jobs, live
        done = [job for job in self.jobs.values() if not job.is_live and job.started]
        used = sum(job.nodes * (job.ended - job.started) for job in done)
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
        return self._print(command, [OTHER, *map(self._row, self.jobs.values())])

    def _row(self, job: FakeJob) -> dict[str, object]:
        after = f"afterany:{job.after}(unfulfilled)" if self._waits_for(job) else "(null)"
        row = dict(i=job.id, T=job.state, D=job.nodes, l=f"{int(job.seconds // 60)}:00", S=self._text(job))
        return row | dict(r=job.reason, E=after, j=job.name)

    @staticmethod
    def _print(command: tuple[str, ...], rows: Iterable[dict[str, object]]) -> str:
        """Return what a command prints of rows (letter of a column -> value). Its form is the last word."""
        form = re.sub("%(.)", r"{\1}", command[-1]) + "\n"
        return "".join(form.format(**row) for row in rows)

    @staticmethod
    def _text(job: FakeJob) -> str:
        return datetime.fromtimestamp(START + job.started, UTC).isoformat()[:19] if job.started else "N/A"

    def _waits_for(self, job: FakeJob) -> bool:
        return job.after in self.jobs and self.jobs[job.after].is_live

    def _sinfo(self, command: tuple[str, ...], broken: bool) -> str:
        if "-N" not in command:
            limit = "infinite" if self.longest_s == math.inf else f"{int(self.longest_s // 60)}:00"
            return self._print(command, [dict(P="main*", l=limit)])
        return self._print(command, [dict(P="main*", N=f"node{n}") for n in range(self.idle())])

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
            free = job.state == "PENDING" and job.reason == "Priority" and not self._waits_for(job)
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
        try:
            leaves = turns.start_job(self.directory, job.number, 0)
        except Killed:
            return self.end(job, "NODE_FAIL")
        if leaves or job.state != "RUNNING":
            return self.end(job, "COMPLETED")
        assert not any(other.is_training for other in self.live()), "two jobs train"
        job.is_training = True
        self.every(TURN_S, lambda: self.turn(job.id), lambda: job.is_training and job.state == "RUNNING")

    def turn(self, own: str = "") -> str:
        try:
            return turns.turn(self.directory, own=own)
        except turns.PASSING as error:
            return f"error: {error}"
        except Killed:
            if own:
                self.end(self.jobs[own], "NODE_FAIL")
            return "killed"

    def end_ranks(self, job: FakeJob, code: int) -> None:
        if job.is_training and job.state == "RUNNING":
            job.is_training = False
            self.monkeypatch.setenv("SLURM_JOB_ID", job.id)
            try:
                turns.end_job(self.directory, job.number, int(self.now - job.started), code)
            except Killed:
                return self.end(job, "NODE_FAIL")
            self.later(3.0, lambda: self.end(job, "COMPLETED"))

    def end(self, job: FakeJob, state: str) -> None:
        if job.is_live:
            job.state, job.is_training, job.ended = state, False, self.now
            self.later(1.0, self.schedule)


def two_jobs(fake: HostileSlurm) -> tuple[FakeJob, FakeJob]:
    """Return a job that trains, and its successor."""
    fake.turn()
    fake.sleep(90)
    first, successor = fake.live()
    assert first.is_training and successor.after == first.id
    return first, successor


def no_answer(*_: object) -> str:
    raise slurm.NoAnswer("no answer")


def fail_to_launch(job: FakeJob) -> None:
    job.state, job.reason, job.started = "PENDING", "launch failed requeued held", 0.0
