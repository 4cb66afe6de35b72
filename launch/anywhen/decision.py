"""Chooses the next job of a run from a view of the queue; pure functions.

One job of a run trains. Its successor waits until it has ended in any way, so a job that is killed is
replaced. A third job, of the fastest size, waits for its turn in the queue, so the run is not slower than one
large job. Once a minute the training job also looks for a hole: nodes that are idle long enough. If a job in
the hole would get further than the training job, it is requested. A job that starts while another one trains
takes over if it gets further, and the other one saves and ends; else it ends itself.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from rl.config.elastic import JobLimits

GAIN = 1.25
"""A job in a hole must get this much further than the running job, because a change costs a start."""
AFTERWARDS = 0.5
"""Assumed speed of the run after the end of a job, relative to that job's: a successor waits. Without it, a
long job on few nodes and a short job on many would each get further than the other."""
LENGTHS = tuple(2.0 ** -(number / 2) for number in range(1, 8))
"""Lengths of the jobs that are considered, as shares of the length that finishes the run."""
LOOKS = 12
"""Maximum number of requests of one kind per turn for which Slurm is asked whether it would accept them."""
SHORTEST_STARTS = 3.0
"""A job lasts at least this many times the seconds before its first step."""
MOST_PAUSE = 5
"""Maximum number of times that the pause before a request doubles. It is turn_s after a request that brought
a job, four times as long after one that did not, because Slurm may carry it out late, and then doubles with
each further one."""


@dataclass(frozen=True)
class Size:
    """A number of nodes with the layout of the run there."""

    nodes: int
    step_s: float
    """Seconds of a step: measured, or the dry run's estimate."""
    overrides: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """Everything about a run that stays the same over its jobs."""

    sizes: list[Size]
    limits: JobLimits
    longest_s: float
    """Maximum time limit of a job, in seconds."""
    lead_s: float
    """Seconds at the end of a job in which it takes no further step."""
    max_steps: int
    """Step after which the run is finished."""
    start_s: float = 300.0
    """Assumed seconds of a job before its first step."""
    turn_s: float = 60.0
    """Seconds between two turns, and the shortest time between two requests."""
    partitions: list[str] = field(default_factory=lambda: [""])
    """Partitions of the jobs; "" is Slurm's default."""
    not_before: float = 0.0
    """Unix time before which no job starts."""
    name: str = ""
    """Beginning of the jobs' names, of which the last part stands for the run directory; the number of the
    request follows."""
    file: str = ""
    """The batch file."""

    def size_of(self, nodes: int) -> Size:
        """Return the size with these nodes, or the closest one: an earlier plan may have had other sizes."""
        return min(self.sizes, key=lambda size: abs(size.nodes - nodes))


@dataclass(frozen=True)
class JobRequest:
    """A job to request."""

    nodes: int
    seconds: float
    partition: str = ""
    after: str = ""
    """Id of the job whose end it waits for; empty: none."""


@dataclass(frozen=True)
class QueuedJob:
    """A job of the run in the queue."""

    id: str
    number: int
    """Number of the request that brought it."""
    nodes: int
    seconds: float
    """Time limit."""
    started: float = 0.0
    """Unix time of its start; 0 for a job that waits."""
    held: str = ""
    """Reason for which it never starts by itself; empty if it does. A limit of the partition may also be the
    reason while nodes are drained."""
    is_successor: bool = False
    """Whether it waits for the end of another job."""
    is_ending: bool = False
    """Whether Slurm ends its processes, or the end of its ranks is noted."""
    has_ranks: bool = True
    """False if its ranks have ended, but not the job."""
    partition: str = ""

    @property
    def is_training(self) -> bool:
        return self.started > 0 and self.has_ranks and not self.is_ending

    @property
    def order(self) -> tuple[float, str]:
        """Place of a running job among the starts of the run."""
        return self.started, self.id


@dataclass(frozen=True)
class QueueView:
    """The queue at one moment, and the progress of the run."""

    plan: Plan
    now: float
    jobs: list[QueuedJob]
    idle: Callable[[], dict[str, list[float]]]
    """Asks Slurm: partition -> for each idle node, the seconds until a waiting job of any user is expected to
    start there."""
    accepts: Callable[[JobRequest], bool | None]
    """Asks Slurm whether it would accept the job; None if it does not answer."""
    steps_left: int
    spent_node_s: float = 0.0
    """Node-seconds of the jobs that have ended."""
    silent_s: float = math.inf
    """Seconds since the last request."""
    refusals: int = 0
    """Number of requests since the last one that brought a job."""
    longest_s: Callable[[], dict[str, float]] = dict
    """Asks Slurm: partition -> its maximum time limit in seconds."""

    def will_train(self, job: QueuedJob) -> bool:
        """Return whether a job trains, or waits in a state and with a size in which it will."""
        if job.started:
            return job.is_training
        is_held, same = bool(job.held), JobRequest(job.nodes, job.seconds, job.partition)
        if job.held.startswith("Partition"):
            is_held = not self.fits(same) or self.accepts(same) is False
        return job.nodes in {size.nodes for size in self.plan.sizes} and not is_held

    def until_all(self, nodes: int) -> float:
        """Return the seconds until the last step of a job that starts now."""
        return self.plan.start_s + self.steps_left * self.plan.size_of(nodes).step_s

    def steps(self, job: JobRequest, start_s: float, horizon: float) -> float:
        """Return the steps of a job, and of slower successors, before a horizon in seconds from now."""
        own = max(0.0, min(job.seconds - self.plan.lead_s, horizon) - start_s)
        seconds = own + AFTERWARDS * max(0.0, horizon - job.seconds)
        return min(float(self.steps_left), seconds / self.plan.size_of(job.nodes).step_s)

    def gets_further(self, ask: JobRequest, running: QueuedJob | None) -> bool:
        """Return whether a job that starts now has GAIN times the running job's steps when it ends."""
        if running is None:
            return True
        horizon = min(ask.seconds, self.until_all(ask.nodes))
        rest = JobRequest(running.nodes, running.started + running.seconds - self.now)
        return self.steps(ask, self.plan.start_s, horizon) >= GAIN * self.steps(rest, 0.0, horizon)

    def fits(self, ask: JobRequest) -> bool:
        """Return whether a job is not longer than its partition allows."""
        return ask.seconds <= self.longest_s().get(ask.partition, math.inf)

    def first_accepted(self, asks: Iterable[JobRequest], is_sure: bool = False) -> JobRequest | None:
        """Return the first request that Slurm would accept and start; a partition may allow less than the
        plan.

        If Slurm does not answer, this is the request of which it was asked, or None if is_sure.
        """
        for ask in islice(filter(self.fits, asks), LOOKS):
            if (answer := self.accepts(ask)) is not False:
                return None if is_sure and not answer else ask
        return None

    def fastest_accepted(self, asks: list[JobRequest]) -> JobRequest | None:
        """Return the first request that Slurm would accept and start; it is asked about few sizes."""
        asks = list(filter(self.fits, asks))
        if not asks or self.accepts(asks[0]) is not False:
            return next(iter(asks), None)

        def shortest(nodes: int) -> JobRequest | None:
            least = min(ask.seconds for ask in asks if ask.nodes == nodes)
            return self.first_accepted(ask for ask in asks if (ask.nodes, ask.seconds) == (nodes, least))

        sizes = sorted({ask.nodes for ask in asks})
        if shortest(sizes[0]) is None:
            return None
        most = sizes[bisect_left(sizes, True, lo=1, key=lambda nodes: shortest(nodes) is None) - 1]
        return self.first_accepted(ask for ask in asks[1:] if ask.nodes <= most) or shortest(most)

    def affordable(self, asks: list[JobRequest], jobs: Sequence[QueuedJob]) -> list[JobRequest]:
        """Return the requests for which the ended jobs and `jobs` leave enough node-hours."""
        booked = self.spent_node_s + sum(job.nodes * job.seconds for job in jobs)
        left = (self.plan.limits.node_hours * 3600 or math.inf) - booked
        return [ask for ask in asks if ask.nodes * ask.seconds <= left]


def decide(view: QueueView) -> tuple[list[QueuedJob], JobRequest | None]:
    """Return waiting jobs to cancel, and then the job to request; usually nothing."""
    plan, doublings = view.plan, min(view.refusals + (view.refusals > 0), MOST_PAUSE)
    if view.silent_s < plan.turn_s * 2**doublings:
        return [], None
    held = [job for job in view.jobs if not job.started and not view.will_train(job)]
    jobs = [job for job in view.jobs if job not in held]
    waiting = sorted((job for job in jobs if not job.started), key=lambda job: job.nodes)
    running, asks, is_full = _newest(jobs), _requests(view), len(jobs) >= plan.limits.jobs
    gone = waiting[:1] if is_full else []  # makes room for a job in a hole
    staying = [job for job in jobs if job not in gone]
    if view.now >= plan.not_before and len(staying) < plan.limits.jobs:
        hole = _find_hole(view, view.affordable(asks, staying))
        if hole and view.gets_further(hole, running):
            return held + gone, hole
    asks = view.affordable(asks, jobs)
    if is_full or not asks:
        return held, None
    sizes = {job.nodes for job in waiting if not job.is_successor}
    if running and not waiting:
        return held, _successor(view, asks, running)
    fastest: JobRequest | None = None
    queues = asks[0].nodes in sizes
    if not queues and view.gets_further(asks[0], running):
        faster = takewhile(lambda ask: ask.nodes not in sizes, asks)
        fastest = view.fastest_accepted([ask for ask in faster if view.gets_further(ask, running)])
        queues = fastest is None and bool(sizes)  # a job of the largest size that the partition allows
        if not (fastest or queues or running):
            fastest = min(asks, key=lambda ask: (ask.nodes, ask.seconds))
    if queues and len(waiting) == 1:
        return held, _successor(view, asks, running)
    return held, fastest


def is_spent(view: QueueView) -> bool:
    """Return whether no job is in the queue, and the node-hours of the user allow none."""
    return not view.jobs and not view.affordable(_requests(view), [])


def takes_over(view: QueueView, job: QueuedJob) -> bool:
    """Return whether a job that has just started is to train instead of the jobs that started before it."""
    trainer = _newest([other for other in view.jobs if other.order < job.order])
    return view.gets_further(JobRequest(job.nodes, job.started + job.seconds - view.now), trainer)


def _newest(jobs: Sequence[QueuedJob]) -> QueuedJob | None:
    """Return the running job that started last."""
    return max((job for job in jobs if job.is_training), key=lambda job: job.order, default=None)


def _requests(view: QueueView) -> list[JobRequest]:
    """Return the jobs of every size and length with enough steps per node-hour, the fastest first."""
    plan, found = view.plan, list[tuple[float, JobRequest]]()
    for size in plan.sizes:
        whole = min(plan.longest_s, (view.until_all(size.nodes) + plan.lead_s) * 1.1 + 60)
        shortest = min(whole, SHORTEST_STARTS * plan.start_s + plan.lead_s + 2 * size.step_s)
        for seconds in {whole, *(60.0 * (share * whole // 60) for share in LENGTHS)}:
            if seconds >= shortest:
                steps = view.steps(JobRequest(size.nodes, seconds), plan.start_s, seconds)
                share = steps / min(seconds, plan.start_s + steps * size.step_s) / size.nodes
                found += [(share, JobRequest(size.nodes, seconds, name)) for name in plan.partitions]
    least = plan.limits.efficiency * max(share for share, _ in found)
    horizon = min(plan.longest_s, min(view.until_all(size.nodes) for size in plan.sizes))
    worth = [ask for share, ask in found if share >= least]
    return sorted(worth, key=lambda ask: -view.steps(ask, plan.start_s, horizon))


def _find_hole(view: QueueView, asks: list[JobRequest]) -> JobRequest | None:
    """Return the fastest job that would start at once and delay no waiting job; None if there is none."""
    idle = view.idle() if asks else {}
    free = (ask for ask in asks if sum(s > ask.seconds for s in idle.get(ask.partition, [])) >= ask.nodes)
    return view.first_accepted(free, is_sure=True)


def _successor(view: QueueView, asks: Sequence[JobRequest], running: QueuedJob | None) -> JobRequest:
    """Return a small job, which soon finds a place, to wait for the running job's end or for its turn.

    It looks for a larger hole once it runs.
    """
    fewest = min(ask.nodes for ask in asks)
    small = sorted((ask for ask in asks if ask.nodes == fewest), key=lambda ask: ask.seconds)
    middle = small[len(small) // 2]
    small.sort(key=lambda ask: abs(ask.seconds - middle.seconds))
    return replace(view.first_accepted(small) or middle, after=running.id if running else "")
