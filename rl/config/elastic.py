"""The section of the configuration for nodes that die, leave or join during a run."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from rl.config.ranges import NOT_NEGATIVE, POSITIVE


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
