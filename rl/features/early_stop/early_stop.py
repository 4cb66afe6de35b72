"""Early end of the points of a sweep, by the median rule or by successive halving."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, median

from rl.checks.batches import CheckFailed
from rl.config.options import ConfigError
from rl.config.sweep import Sweep
from rl.features.sweep.point_stop import ENDED_EARLY, Survivors


class EarlyStop(Survivors):
    """Decides which points end early. The decision depends only on metrics that rank 0 logs.

    A step is judged once all live points have taken it. A point ahead of the others may therefore take one
    more step than its rule allows, but no decision reads this step. For example, point 0 has begun step 11
    when point 1 finishes step 10, and the rule then ends point 0 after step 10. A resumed run judges the
    steps of earlier starts again, because a fault may have come between a decision and the point's end.

    A value that is not finite ranks last. Points that have not logged the metric are not compared.
    """

    def __init__(self, config: Sweep, num_points: int, *, due: int = 0):
        super().__init__(config, num_points)
        self._config, self._due = config, max(config.first, due)
        self._values: list[dict[int, float]] = [{} for _ in range(num_points)]
        """The metric of each point by step; -inf for a value that is not finite."""
        self._last = [0] * num_points
        """The last step of each point."""
        self._over: set[int] = set()
        """Points that have taken their last step. Their steps still take part in the judgement."""
        self._judged = 0
        self.reads = frozenset({config.metric})

    def remember(self, point: int, records: Sequence[Mapping[str, float]], *, is_over: bool) -> None:
        for record in records:
            self._note(point, int(record["training/global_step"]), record)
        if is_over:
            self._over.add(point)

    def record(self, point: int, step: int, metrics: Mapping[str, float], *, is_last: bool = False) -> None:
        """Note and judge. Raises ConfigError if no point logs the metric."""
        self._note(point, step, metrics)
        if is_last:
            self._over.add(point)
        self.judge()

    def judge(self) -> None:
        while True:
            self._live -= {p for p in self._over if self._last[p] <= self._judged}
            if not self._live or self._judged >= min(self._last[p] for p in self._live):
                return
            self._judged += 1
            self._judge(self._judged)

    def _note(self, point: int, step: int, metrics: Mapping[str, float]) -> None:
        if (last := self._last[point]) and step > last + 1:
            raise CheckFailed(
                f"sweep check: sweep.stop={self._config.stop} has the metrics of point {point} up to step "
                f"{last} and of step {step}, but none between: steps before a resume were lost, so the rule "
                "would end other points. Set sweep.stop=none to continue without it."
            )
        self._last[point] = max(self._last[point], step)
        if self._config.metric in metrics and step and point not in self.reasons:
            value = metrics[self._config.metric]  # metrics.jsonl has None for a value that is not finite
            is_finite = value is not None and math.isfinite(value)
            self._values[point][step] = value if is_finite else -math.inf

    def _judge(self, step: int) -> None:
        """End points after `step`. All live points must have taken this step."""
        first = self._config.first
        seen = [[value for at, value in values.items() if at <= step] for values in self._values]
        if step >= self._due and not any(seen):
            raise ConfigError(
                f"sweep.stop={self._config.stop} compares sweep.metric={self._config.metric}, which no point "
                f"has logged in {step} steps; name a metric of the points' metrics.jsonl."
            )
        known = [point for point in sorted(self._live) if seen[point]]
        if step < first or len(known) < 2:
            return
        if self._config.stop == "median":
            for point in known:
                others = [_mean(values) for other, values in enumerate(seen) if values and other != point]
                best, bound = max(seen[point]), median(others)
                if best < bound:
                    self._end(point, step, f"best {self._config.metric} {best:.4g} < median {bound:.4g}")
        elif step % first == 0 and (step // first).bit_count() == 1:
            latest = {point: seen[point][-1] for point in known}
            order = sorted(known, key=lambda point: (-latest[point], point))
            for place, point in enumerate(order[(len(order) + 1) // 2 :], (len(order) + 1) // 2 + 1):
                found = f"{self._config.metric} {latest[point]:.4g}"
                self._end(point, step, f"place {place} of {len(order)} with {found}")

    def _end(self, point: int, step: int, why: str) -> None:
        self._live.discard(point)
        # A later step of the point does not count (`_note`), because a resumed run may not take it.
        self._values[point] = {at: value for at, value in self._values[point].items() if at <= step}
        self.reasons[point] = f"{ENDED_EARLY}{self._config.stop} after step {step}: {why}"


def _mean(values: list[float]) -> float:
    """Return the mean of the finite values; -inf without a finite value, which ranks last."""
    return mean([value for value in values if math.isfinite(value)] or [-math.inf])
