"""A cluster with first come, first served and EASY backfill, in seconds, for runs that look for holes.

A job may start before the first waiting job if it does not delay that job's start, which follows from the
time limits of the running jobs. Other users' jobs end before their limits.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from launch.anywhen.decision import JobRequest, Plan, QueuedJob, QueueView, decide, size_of, takes_over

HOUR = 3600.0


@dataclass
class Job:
    """A job of anyone. runs_s: seconds after which it ends by itself."""

    id: str
    nodes: int
    seconds: float
    runs_s: float
    after: str = ""
    is_held: bool = False
    started: float = -1.0


class Cluster:
    """The queue; `advance` starts and ends jobs."""

    def __init__(self, nodes: int):
        self.nodes, self.now = nodes, 0.0
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.is_settled = True

    @property
    def idle(self) -> int:
        return self.nodes - sum(job.nodes for job in self.running)

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        self.is_settled = False

    def kill(self, job: Job) -> None:
        for queue in (self.running, self.waiting):
            if job in queue:
                queue.remove(job)
                self.is_settled = False

    def advance(self, now: float) -> None:
        self.now = now
        left = [job for job in self.running if now < job.started + min(job.seconds, job.runs_s)]
        if self.is_settled and len(left) == len(self.running):
            return  # time alone lets no job start
        self.running, self.is_settled = left, True
        here = {job.id for job in [*self.running, *self.waiting]}
        ready = [job for job in self.waiting if not job.is_held and job.after not in here]
        while ready and ready[0].nodes <= self.idle:
            self.start(ready.pop(0))
        start, spare = self.hole()
        for job in ready[1:]:
            if job.nodes <= self.idle and (now + job.seconds <= start or job.nodes <= spare):
                spare -= job.nodes if now + job.seconds > start else 0
                self.start(job)

    def start(self, job: Job) -> None:
        job.started = self.now
        self.running.append(job)
        self.waiting.remove(job)

    def hole(self) -> tuple[float, int]:
        """Return when the first waiting job will start, and how many nodes it leaves idle then."""
        here = {job.id for job in [*self.running, *self.waiting]}
        first = next((job for job in self.waiting if not job.is_held and job.after not in here), None)
        if first is None:
            return float("inf"), self.nodes
        free = self.idle
        if free >= first.nodes:
            return self.now, free - first.nodes
        for job in sorted(self.running, key=lambda job: job.started + job.seconds):
            free += job.nodes
            if free >= first.nodes:
                return job.started + job.seconds, free - first.nodes
        raise AssertionError(f"{first} needs more nodes than there are")

    def fits(self, nodes: int, seconds: float) -> bool:
        start, spare = self.hole()
        return nodes <= self.idle and (self.now + seconds <= start or nodes <= spare)


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


class Simulation:
    """One run on a cluster with a trace.

    policy: called once a minute with this object; may refuse, kill and hold (`refuses`, `kill`, `hold`).
    """

    def __init__(
        self, nodes: int, others: Iterable[tuple[float, Job]], plan: Plan, steps: int, stays: bool = False
    ):
        self.cluster, self.plan, self.steps = Cluster(nodes), plan, steps
        self.others = [(at, replace(job)) for at, job in others]
        self.mine = set[str]()
        self.done = 0
        """Steps that are in a checkpoint."""
        self.trainer: Job | None = None
        self.since = 0
        self.asked = -float("inf")
        self.requests: list[float] = []
        self.refusals = 0
        self.spent = 0.0
        self.refuses = False
        self.layouts: list[int] = []
        self.stays = stays

    def live(self) -> list[Job]:
        here = [*self.cluster.running, *self.cluster.waiting]
        return [job for job in here if job.id in self.mine]

    def run(self, begin: float, policy=lambda sim: None, until: float = 2000 * HOUR) -> float:
        """Return the hours from `begin` to the last step."""
        now = 0.0
        while now < until:
            while self.others and self.others[0][0] <= now:
                self.cluster.submit(self.others.pop(0)[1])
            self.cluster.advance(now)
            if now >= begin:
                policy(self)
                self._train(now)
                if self.done >= self.steps:
                    return (now - begin) / HOUR
                self._turn(now)
                self._check(now, begin)
            now += self.plan.turn_s
        raise AssertionError(f"{self.done} of {self.steps} steps after {until / HOUR} hours")

    def _train(self, now: float) -> None:
        """Let a job that has just started take over or leave, and count the steps of the one that trains."""
        for job in self.live():
            if job.started >= 0 and job is not self.trainer:
                started = next(queued for queued in self._jobs() if queued.id == job.id)
                takes = takes_over(self.plan, self._view(), started)
                self.cluster.kill(job if not takes else self.trainer or Job("", 0, 0, 0))
                if takes:
                    self._end_trainer()
                    self.trainer, self.since = job, self.done
                    self.layouts.append(job.nodes)
        if self.trainer is not None and self.trainer not in self.cluster.running:
            self._end_trainer()
        if self.trainer is not None:
            seconds = min(now - self.trainer.started, self.trainer.seconds - self.plan.lead_s)
            step_s = size_of(self.plan, self.trainer.nodes).step_s
            steps = max(0, int((seconds - self.plan.start_s) / step_s))
            self.done = min(self.steps, self.since + steps)

    def _end_trainer(self) -> None:
        if self.trainer is not None:
            self.spent += (self.cluster.now - self.trainer.started) * self.trainer.nodes
        self.trainer = None

    def _jobs(self) -> list[QueuedJob]:
        return [
            QueuedJob(
                job.id,
                job.nodes,
                job.seconds,
                0 if job.started < 0 else 1 if job is self.trainer else 2,
                job.started + job.seconds,
                job.is_held,
                bool(job.after) and job.started < 0,
            )
            for job in self.live()
        ]

    def _view(self) -> QueueView:
        now = self.cluster.now
        return QueueView(
            now,
            self._jobs(),
            {"": self.cluster.idle},
            {"": self.cluster.hole()[0] - now},
            lambda ask: self.cluster.fits(ask.nodes, ask.seconds),
            int(self.steps - self.done),
            self.spent,
            now - self.asked,
            self.refusals,
        )

    def _turn(self, now: float) -> None:
        if self.trainer is None and len(self.requests) >= self.plan.limits.jobs and not self.stays:
            return  # the command that submitted the first jobs has ended
        decision = decide(self.plan, self._view())
        for job in self.live():
            if job.id in decision.cancel:
                assert job.started < 0
                self.cluster.kill(job)
        if decision.ask is not None:
            self._submit(now, decision.ask)

    def _submit(self, now: float, ask: JobRequest) -> None:
        self.requests.append(now)
        self.asked = now
        if self.refuses:
            self.refusals += 1
            return
        self.refusals, number = 0, len(self.requests)
        job = Job(f"mine-{number}", ask.nodes, ask.seconds, ask.seconds, ask.after)
        self.mine.add(job.id)
        self.cluster.submit(job)
        self.cluster.advance(now)

    def _check(self, now: float, begin: float) -> None:
        limits, live = self.plan.limits, self.live()
        assert len(live) <= limits.jobs
        booked = self.spent + sum(job.nodes * job.seconds for job in live)
        assert not limits.node_hours or booked <= limits.node_hours * HOUR
        assert all(job.started < 0 or job.started >= self.plan.not_before for job in live)
        assert all(
            later - sooner >= self.plan.turn_s for sooner, later in zip(self.requests, self.requests[1:])
        )
