"""The section of the configuration for a sweep in one job."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rl.config.ranges import AT_LEAST_ONE


@dataclass
class Sweep:
    """Several runs in one job: each trains an adapter of its own on one base model, and one engine generates
    for all of them (docs/launch.md). Requires `adapter.in_engine=adapter`."""

    adapters: list[dict[str, Any]] = field(default_factory=list)
    """The points: mappings of dotted keys to the values that differ, for example `{training.optimizer.lr:
    1e-4, run.seed: 2}`. The directory of a point is `<run.dir>/<name>`; its name follows from its values.
    Empty: no sweep."""
    stop: Literal["none", "median", "halving"] = "none"
    """Rule that ends points before run.max_steps. median: a point ends if its best `metric` so far is below
    the median of the other points' means up to the same step (Google Vizier). halving: at steps `first`, 2
    `first`, 4 `first`, ... the best half of the points continues (successive halving, arXiv:1502.07943)."""
    metric: str = "critic/score/mean"
    """Metric that the rule compares, as rank 0 logs it; higher is better. A value that is not finite ranks
    last. With a metric of the validation, only the steps that logged it are compared."""
    first: Annotated[int, AT_LEAST_ONE] = 10
    """First step after which the rule may end a point."""

    @property
    def is_on(self) -> bool:
        return bool(self.adapters)
