"""A cluster with first come, first served and EASY backfill, in seconds, for runs that look for holes.

A job may start before the first waiting job if it does not delay that job's start, which follows from the
time limits of the running jobs. Other users' jobs end before their limits.
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from launch.anywhen.decision import Plan, QueuedJob, QueueView, decide, takes_over

HOUR = 3600.0


@dataclass
class Job:
    """A job of anyone. runs_s: seconds after which it ends by itself."""

    id: str
    nodes: int
    seconds: float
    runs_s: float
    after: str = ""
    begin: float = 0.0
    is_held: bool = False
    started: float = -1.0


def trace(rng: random.Random, nodes: int, load: float, hours: float) -> list[tuple[float, Job]]:
    """Return other users' jobs with their times of submission; load: offered node-hours / node-hours."""
    out, now = list[tuple[float, Job]](), 0.0
    while now < hours * HOUR:
        width = min(nodes, 2 ** rng.choice([0, 0, 1, 1, 2, 2, 3, 3, 4, 5]))
        limit = rng.choice([1, 2, 4, 8, 12, 24]) * HOUR
        lasts = limit * rng.uniform(0.3, 1.0)
        now += rng.expovariate(1 / (width * lasts / nodes / load))
        out.append((now, Job(f"other-{len(out)}", width, limit, lasts)))
    return out


class Cluster:
    """The queue; `advance` submits the jobs of a trace, and starts and ends jobs."""

    def __init__(self, nodes: int, others: Iterable[tuple[float, Job]] = ()):
        self.nodes, self.now = nodes, 0.0
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self._others = [(at, replace(job)) for at, job in others]
        self._is_settled = False

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        self._is_settled = False

    def kill(self, job: Job) -> None:
        self.running = [other for other in self.running if other is not job]
        self.waiting = [other for other in self.waiting if other is not job]
        self._is_settled = False

    def advance(self, now: float) -> None:
        self.now = now
        while self._others and self._others[0][0] <= now:
            self.submit(self._others.pop(0)[1])
        left = [job for job in self.running if now < job.started + min(job.seconds, job.runs_s)]
        if self._is_settled and len(left) == len(self.running):
            return  # time alone lets no job start
        self.running, self._is_settled = left, all(job.begin <= now for job in self.waiting)
        for job in self._ready():
            if sum(free_s >= job.seconds for free_s in self.idle_s()) >= job.nodes:
                job.started = now
                self.running.append(job)
                self.waiting.remove(job)

    @property
    def idle(self) -> int:
        return self.nodes - sum(job.nodes for job in self.running)

    def idle_s(self) -> list[float]:
        """Return, for each idle node, the seconds until the first waiting job will start there."""
        free = idle = self.idle
        first = next((job for job in self._ready() if job.nodes > free), None)
        for job in sorted(self.running, key=lambda job: job.started + job.seconds):
            free += job.nodes
            if first and free >= first.nodes:
                start = job.started + job.seconds
                later = [other.nodes for other in self.running if other.started + other.seconds > start]
                spare = max(0, min(idle, self.nodes - sum(later) - first.nodes))
                return [math.inf] * spare + [start - self.now] * (idle - spare)
        assert first is None, f"{first} needs more nodes than there are"
        return [math.inf] * idle

    def _ready(self) -> list[Job]:
        here = {job.id for job in [*self.running, *self.waiting]}
        ready = [job for job in self.waiting if not job.is_held and job.after not in here]
        return [job for job in ready if job.begin <= self.now]


class Simulation:
    """One run on a cluster with a trace. The run's turns are those of its jobs, or of `submit --stay`.

    policy: called at each moment with this object; may refuse, kill and hold (`refuses`, `cluster`).
    """

    def __init__(self, cluster: Cluster, plan: Plan, stays: bool = False):
        self.cluster, self.plan, self.stays = cluster, plan, stays
        self.mine = set[str]()
        self.done = self._since = 0
        """Steps that are in a checkpoint, now and when the trainer started."""
        self.trainer: Job | None = None
        self.requests: list[float] = []
        self.refuses, self.refusals = False, 0
        self.spent = 0.0
        self.layouts: list[int] = []

    def run(self, begin: float, policy: Callable[["Simulation"], None] = lambda sim: None) -> float:
        """Return the hours from `begin` to the last step."""
        now = 0.0
        while self.done < self.plan.max_steps:
            assert now < 2000 * HOUR, f"{self.done} steps"
            self.cluster.advance(now)
            if now >= begin:
                policy(self)
                self._train(now)
                if self.trainer or self.stays or len(self.requests) < self.plan.limits.jobs:
                    self._turn(now)
                self._check()
            now += self.plan.turn_s
        return (now - self.plan.turn_s - begin) / HOUR

    def live(self) -> list[Job]:
        return [job for job in [*self.cluster.running, *self.cluster.waiting] if job.id in self.mine]

    def _train(self, now: float) -> None:
        """Let a job that has just started take over or leave, and count the steps of the one that trains."""
        for job in self.live():
            if job.started >= 0 and job is not self.trainer:
                view = self._view()
                if not takes_over(view, next(own for own in view.jobs if own.id == job.id)):
                    self.cluster.kill(job)
                    continue
                self._end_trainer()
                self.trainer, self._since = job, self.done
                self.layouts.append(job.nodes)
        if self.trainer and self.trainer not in self.cluster.running:
            self._end_trainer()
        if (trainer := self.trainer) is not None:
            seconds = min(now - trainer.started, trainer.seconds - self.plan.lead_s) - self.plan.start_s
            steps = max(0, int(seconds / self.plan.size_of(trainer.nodes).step_s))
            self.done = min(self.plan.max_steps, self._since + steps)

    def _end_trainer(self) -> None:
        if job := self.trainer:
            self.cluster.kill(job)
            self.spent += (self.cluster.now - job.started) * job.nodes
        self.trainer = None

    def _view(self) -> QueueView:
        jobs = [
            QueuedJob(
                job.id,
                int(job.id.rpartition("-")[2]),
                job.nodes,
                job.seconds,
                max(0.0, job.started),
                "JobHeldAdmin" if job.is_held else "",
                bool(job.after) and job.started < 0,
            )
            for job in self.live()
        ]
        return QueueView(
            self.plan,
            self.cluster.now,
            jobs,
            lambda: {"": self.cluster.idle_s()},
            lambda ask: True,
            self.plan.max_steps - self.done,
            self.spent,
            self.cluster.now - (self.requests or [-float("inf")])[-1],
            self.refusals,
        )

    def _turn(self, now: float) -> None:
        cancel, ask = decide(self._view())
        for job in self.live():
            if job.id in {other.id for other in cancel}:
                assert job.started < 0
                self.cluster.kill(job)
        if ask is None:
            return
        self.requests.append(now)
        self.refusals = self.refusals + 1 if self.refuses else 0
        if not self.refuses:
            job = Job(
                f"mine-{len(self.requests)}",
                ask.nodes,
                ask.seconds,
                ask.seconds,
                ask.after,
                self.plan.not_before,
            )
            self.mine.add(job.id)
            self.cluster.submit(job)
            self.cluster.advance(now)

    def _check(self) -> None:
        limits, live = self.plan.limits, self.live()
        assert len(live) <= limits.jobs
        booked = self.spent + sum(job.nodes * job.seconds for job in live)
        assert not limits.node_hours or booked <= limits.node_hours * HOUR
        assert all(job.started < 0 or job.started >= self.plan.not_before for job in live)
        assert all(b - a >= self.plan.turn_s for a, b in zip(self.requests, self.requests[1:]))
