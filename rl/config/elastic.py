"""The sections of the configuration for nodes that die, leave or join, and for jobs that start now."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from rl.config.ranges import AT_LEAST_TWO, FRACTION, NOT_NEGATIVE, POSITIVE


@dataclass
class Elastic:
    """A run that continues on other nodes in the same job (docs/slurm.md), by slurm/elastic.sbatch."""

    min_nodes: Annotated[int, NOT_NEGATIVE] = 0
    """Minimum number of nodes; with fewer the job stops. 0: no elastic run."""
    max_nodes: Annotated[int, NOT_NEGATIVE] = 0
    """Maximum number of nodes of the run. Further nodes are spare: they replace nodes that die."""
    layouts: list[dict[str, Any]] = field(default_factory=list)
    """Layouts: mappings of `nodes` to a number of nodes, and of dotted keys of `training`, `rollout` and
    `roles` to their values there, such as `{nodes: 2, training.tp: 4}`. The run uses the largest layout for
    which enough nodes live. Empty: the config's own layout if it fits the ranks, else the fastest that the
    dry run finds."""
    lost_s: Annotated[float, POSITIVE] = 20.0
    """Seconds without a sign of life after which a node counts as dead."""

    @property
    def is_on(self) -> bool:
        return self.min_nodes > 0


@dataclass
class JobLimits:
    """Limits of the jobs that `lockstep submit --anywhen` requests (docs/slurm.md)."""

    jobs: Annotated[int, AT_LEAST_TWO] = 3
    """Maximum number of jobs in the queue at any moment, running or waiting; at least 2, because a job
    requests its successor. With 2 none of the fastest size waits for its turn."""
    node_hours: Annotated[float, NOT_NEGATIVE] = 0.0
    """Maximum node-hours of all jobs, each counted with its whole time limit until it has ended. 0: no
    limit."""
    partitions: list[str] = field(default_factory=list)
    """Partitions that the jobs may use. Empty: the partition of `--partition` or of SBATCH_PARTITION, or
    Slurm's default."""
    not_before: str = ""
    """Local time before which no job starts, such as 2026-12-24T18:00. Empty: now."""
    efficiency: Annotated[float, FRACTION] = 0.5
    """Minimum steps per node-hour of a job, as a share of the best size's. At 1 the run uses the size with
    the cheapest steps only; at 0 the fastest."""
