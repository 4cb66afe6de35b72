"""How the points of a sweep end: with the job, by hand, or by a rule."""

from collections.abc import Mapping, Sequence

from rl.config.sweep import Sweep
from rl.phases.step_record import StepRecord
from rl.runtime.collectives import broadcast_object
from rl.stopping.requests import StopDecision, StopRequests

ENDED_EARLY = "sweep.stop="
"""Beginning of the reason of a point that ended early."""


class Survivors:
    """The points of a sweep that continue. No rule ends a point here (`sweep.stop=none`).

    Args:
        due: step by which a point must have logged `sweep.metric`, if it is later than `sweep.first`.
    """

    reads: frozenset[str] = frozenset()
    """Names of the metrics that the rule reads."""

    def __init__(self, config: Sweep, num_points: int, *, due: int = 0):
        self._live = set(range(num_points))
        self.reasons: dict[int, str] = {}
        """Number of a point -> why a rule ended the point."""

    @property
    def live(self) -> frozenset[int]:
        """The points that continue."""
        return frozenset(self._live)

    def leave(self, point: int) -> None:
        """Go on without a point that somebody has stopped."""
        self._live.discard(point)

    def remember(self, point: int, records: Sequence[Mapping[str, float]], *, is_over: bool) -> None:
        """Take the steps of an earlier start. is_over: whether the point has ended."""

    def record(self, point: int, step: int, metrics: Mapping[str, float], *, is_last: bool = False) -> None:
        """Note rank 0's metrics of a point's step, and judge the steps that all points have taken."""

    def judge(self) -> None:
        """Judge the steps that all points have taken, including steps of earlier starts."""


class PointStop(StopRequests):
    """The stop requests of one point: requests of the job or the point, and the end by the rule of
    `sweep.stop`.

    Args:
        own: requests in the point's directory, such as the file `save`.
        job: requests of the whole sweep.
        to_save: points that have yet to save for a request of the whole sweep. All points share this set,
            because only the first point finds the file `save`.
    """

    def __init__(
        self,
        own: StopRequests,
        job: StopRequests,
        survivors: Survivors,
        to_save: set[int],
        point: int,
        step: StepRecord,
        last: int,
    ):
        self._own, self._of_job, self._survivors, self._to_save = own, job, survivors, to_save
        self._point, self._step, self._last_step = point, step, last

    def agree(self) -> StopDecision:
        """Return the pending requests of all ranks. Collective over the world; call it between two steps."""
        job, own = self._of_job.agree(), self._own.agree()
        if job.save:
            self._to_save |= self._survivors.live
        save = own.save or self._point in self._to_save
        self._to_save.discard(self._point)
        if own.by_hand:
            self._survivors.leave(self._point)
        # The end by a rule comes first, so that the point's status names it.
        if rule := self._survivors.reasons.get(self._point, ""):
            return StopDecision(rule, save, is_final=True)
        return StopDecision(job.reason or own.reason, save)

    def is_requested(self) -> bool:
        """Return whether the store has a request to stop the job. Not collective."""
        return self._of_job.is_requested()

    def record_step(self, step: float, save: float, *, unstoppable: float) -> str:
        """Judge a complete step, and record its seconds, like `StopRequests.record_step`.

        Collective over the world.
        """
        number, metrics = self._step.number, self._step.metrics
        if self._survivors.reads:  # timings and a user's metrics may differ between ranks
            metrics = broadcast_object({n: metrics[n] for n in self._survivors.reads & metrics.keys()})
        self._survivors.record(self._point, number, metrics, is_last=number >= self._last_step)
        return self._of_job.record_step(step, save, unstoppable=unstoppable)
