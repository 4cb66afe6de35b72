"""Chooses the next job of a run from a view of the queue; pure functions.

One job of a run trains. Its successor waits until it has ended in any way, so a job that is killed is
replaced. A third job, of the fastest size, waits for its turn in the queue, so the run is not slower than one
large job. Once a minute the training job also looks for a hole: nodes that are idle long enough. If a job in
the hole would get further than the training job, it is requested. A job that starts while another one trains
takes over if it gets further, and the other one saves and ends; else it ends itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

GAIN = 1.25
"""A job in a hole must get this much further than the running job, because a change costs a start."""
AFTERWARDS = 0.5
"""Assumed speed of the run after the end of its running job, relative to that job's: a successor waits."""
LOOKS = 12
"""Maximum number of jobs per turn for which Slurm is asked when they would start."""
SHORTEST_STARTS = 3.0
"""A job lasts at least this many times the seconds before its first step."""
MOST_PAUSE = 5
"""Each refused request doubles the pause before the next one, this many times at most."""


@dataclass(frozen=True)
class Limits:
    """Limits of the user for the jobs of one run."""

    jobs: int = 3
    """Maximum number of jobs of the run in the queue at any moment, running or waiting; at least 2. With 2
    none of the fastest size waits for its turn."""
    node_hours: float = 0.0
    """Maximum number of node-hours of all jobs of the run, each counted with its whole time limit until it
    has ended. 0: no limit."""
    partitions: str = ""
    """Partitions that the jobs may use, separated by commas. Empty: Slurm's default partition."""
    not_before: str = ""
    """Local time before which no job starts, as 2026-12-24T18:00. Empty: now."""
    efficiency: float = 0.5
    """Minimum steps per node-hour of a job, as a share of the best size's. At 1 the run uses the size with
    the cheapest steps only; at 0 the fastest."""


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
    limits: Limits
    longest_s: float
    """Maximum time limit of a job, in seconds."""
    start_s: float
    """Seconds of a job before its first step."""
    lead_s: float
    """Seconds at the end of a job in which it takes no further step."""
    turn_s: float = 60.0
    """Seconds between two turns, and the shortest time between two requests."""
    not_before: float = 0.0
    """Unix time of `limits.not_before`."""


@dataclass(frozen=True)
class JobRequest:
    """A job to request."""

    nodes: int
    seconds: float
    partition: str
    after: str = ""
    """Id of the job whose end it waits for; empty: none."""


@dataclass(frozen=True)
class QueuedJob:
    """A job of the run in the queue."""

    id: str
    nodes: int
    seconds: float
    """Time limit."""
    starts: int = 0
    """Number of starts of jobs of the run until this one's; 0 for a job that waits."""
    ends: float = 0.0
    """Unix time at which Slurm will end it; 0 for a job that waits."""
    is_held: bool = False
    is_successor: bool = False
    """Whether it waits for the end of another job."""

    @property
    def is_running(self) -> bool:
        return self.starts > 0


@dataclass(frozen=True)
class QueueView:
    """The queue at one moment, and the progress of the run."""

    now: float
    jobs: list[QueuedJob]
    idle: dict[str, int]
    """Partition -> number of idle nodes."""
    hole_s: dict[str, float]
    """Partition -> seconds until the first waiting job of any user is expected to start there."""
    starts_now: Callable[[JobRequest], bool]
    """Asks Slurm whether the job would start at once."""
    steps_left: int
    spent_node_s: float = 0.0
    """Node-seconds of the jobs that have ended."""
    silent_s: float = float("inf")
    """Seconds since the last request."""
    refusals: int = 0
    """Number of requests since the last one that Slurm took."""


@dataclass(frozen=True)
class Decision:
    cancel: list[str] = field(default_factory=list)
    """Ids of waiting jobs to cancel before the request."""
    ask: JobRequest | None = None


def decide(plan: Plan, view: QueueView) -> Decision:
    """Return the next request and the waiting jobs that make room for it; usually nothing."""
    if view.steps_left <= 0 or view.silent_s < plan.turn_s * 2 ** min(view.refusals, MOST_PAUSE):
        return Decision()
    held = [job.id for job in view.jobs if job.is_held]
    running = max((job for job in view.jobs if job.is_running), key=lambda job: job.starts, default=None)
    waiting = [job for job in view.jobs if not job.is_running and not job.is_held]
    room = plan.limits.jobs - len(view.jobs) + len(held)
    gone = [] if room else sorted(waiting, key=lambda job: job.nodes)[:1]  # makes room for a job in a hole
    staying = [job for job in view.jobs if job not in gone and not job.is_held]
    if view.now >= plan.not_before and plan.limits.jobs > len(staying):
        hole = _find_hole(plan, view, _node_s_left(plan, view, staying))
        if hole and (running is None or _gets_further(plan, view, hole, running)):
            return Decision(held + [job.id for job in gone], hole)
    asks = _asks(plan, view, _node_s_left(plan, view, [job for job in view.jobs if not job.is_held]))
    if room < 1 or not asks:
        return Decision(held)
    fastest = max(asks, key=partial(_reached, plan, view))
    queues = any(job.nodes == fastest.nodes and not job.is_successor for job in waiting)
    if running is None and not queues:
        return Decision(held, fastest)
    if len(waiting) == queues:
        return Decision(held, _successor(asks, running))
    if not queues and running and _gets_further(plan, view, fastest, running):
        return Decision(held, fastest)
    return Decision(held)


def takes_over(plan: Plan, view: QueueView, job: QueuedJob) -> bool:
    """Return whether a job that has just started is to train instead of the jobs that started before it."""
    trainer = max(
        (other for other in view.jobs if 0 < other.starts < job.starts), key=lambda j: j.starts, default=None
    )
    ask = JobRequest(job.nodes, job.ends - view.now, "")
    return trainer is None or _gets_further(plan, view, ask, trainer)


def _node_s_left(plan: Plan, view: QueueView, jobs: list[QueuedJob]) -> float:
    """Return the node-seconds of the user's limit that the ended jobs and these jobs leave."""
    limit = plan.limits.node_hours * 3600 or float("inf")
    return limit - view.spent_node_s - sum(job.nodes * job.seconds for job in jobs)


def rate(plan: Plan, ask: JobRequest, steps_left: int) -> float:
    """Return the mean steps per second of a job, with its start and its lead."""
    step_s = size_of(plan, ask.nodes).step_s
    steps = min(float(steps_left), max(0.0, ask.seconds - plan.start_s - plan.lead_s) / step_s)
    return steps / min(ask.seconds, plan.start_s + steps * step_s)


def size_of(plan: Plan, nodes: int) -> Size:
    return next(size for size in plan.sizes if size.nodes == nodes)


def _whole(plan: Plan, size: Size, steps_left: int) -> float:
    """Return the seconds of a job that would finish the run, limited to the longest job."""
    return min(plan.longest_s, (plan.start_s + plan.lead_s + steps_left * size.step_s) * 1.1 + 60)


def _shortest(plan: Plan, size: Size) -> float:
    return min(plan.longest_s, SHORTEST_STARTS * plan.start_s + plan.lead_s + 2 * size.step_s)


def _lasting(plan: Plan, view: QueueView, partition: str) -> Iterator[JobRequest]:
    """Yield jobs of every size and of several lengths, that have enough steps per node-hour."""
    wholes = {size.nodes: _whole(plan, size, view.steps_left) for size in plan.sizes}
    best = max(
        rate(plan, JobRequest(size.nodes, wholes[size.nodes], partition), view.steps_left) / size.nodes
        for size in plan.sizes
    )
    for size in plan.sizes:
        whole, hole_s = wholes[size.nodes], view.hole_s.get(partition, 0.0)
        lengths = {60.0 * (each // 60) for each in (whole, whole / 2, whole / 4, whole / 8, hole_s * 0.98)}
        for seconds in (each for each in lengths if _shortest(plan, size) <= each <= whole):
            ask = JobRequest(size.nodes, seconds, partition)
            if rate(plan, ask, view.steps_left) / size.nodes >= plan.limits.efficiency * best:
                yield ask


def _partitions(plan: Plan) -> list[str]:
    return [name.strip() for name in plan.limits.partitions.split(",")]


def _asks(plan: Plan, view: QueueView, left: float) -> list[JobRequest]:
    """Return all jobs that are worth their start. left: node-seconds of the user's limit."""
    asks = [ask for partition in _partitions(plan) for ask in _lasting(plan, view, partition)]
    return [ask for ask in asks if ask.nodes * ask.seconds <= left]


def _find_hole(plan: Plan, view: QueueView, left: float) -> JobRequest | None:
    """Return the fastest job that would start at once; None if there is none."""
    asks = [ask for ask in _asks(plan, view, left) if ask.nodes <= view.idle.get(ask.partition, 0)]
    refused: list[JobRequest] = []
    for ask in sorted(asks, key=partial(_reached, plan, view), reverse=True):
        if len(refused) == LOOKS:
            break
        if any(
            no.partition == ask.partition and no.nodes <= ask.nodes and no.seconds <= ask.seconds
            for no in refused
        ):
            continue
        if view.starts_now(ask):
            return ask
        refused.append(ask)
    return None


def _reached(plan: Plan, view: QueueView, ask: JobRequest) -> float:
    """Return the steps that the run has, if this job starts now, when the fastest size could have all."""
    horizon = min(plan.longest_s, min(_until_all(plan, view, size.nodes) for size in plan.sizes))
    return _progress(plan, view, ask.nodes, ask.seconds, plan.start_s, horizon)


def _until_all(plan: Plan, view: QueueView, nodes: int) -> float:
    """Return the seconds until the last step of a job that starts now."""
    return plan.start_s + view.steps_left * size_of(plan, nodes).step_s


def _gets_further(plan: Plan, view: QueueView, ask: JobRequest, running: QueuedJob) -> bool:
    """Return whether a job that starts now has GAIN times the running job's steps when it ends."""
    horizon = min(ask.seconds, _until_all(plan, view, ask.nodes))
    stays = _progress(plan, view, running.nodes, running.ends - view.now, 0.0, horizon)
    return _progress(plan, view, ask.nodes, ask.seconds, plan.start_s, horizon) >= GAIN * stays


def _progress(
    plan: Plan, view: QueueView, nodes: int, seconds: float, start_s: float, horizon: float
) -> float:
    """Return the steps of a job of so many further seconds, and of slower successors, until a horizon."""
    job = max(0.0, min(seconds - plan.lead_s, horizon) - start_s)
    later = AFTERWARDS * max(0.0, horizon - seconds)
    return min(float(view.steps_left), (job + later) / size_of(plan, nodes).step_s)


def _successor(asks: list[JobRequest], running: QueuedJob | None) -> JobRequest:
    """Return a small job, which soon finds a place, to wait for the running job's end or for its turn.

    It looks for a larger hole once it runs.
    """
    fewest = min(ask.nodes for ask in asks)
    small = sorted((ask for ask in asks if ask.nodes == fewest), key=lambda ask: ask.seconds)
    return replace(small[len(small) // 2], after=running.id if running else "")
