"""The section of the configuration for ranks that train and ranks that generate."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.config.ranges import NOT_NEGATIVE


@dataclass
class Roles:
    """Trainers beside generators (docs/asynchrony.md): each rank of the job either trains or generates. The
    critic, the reference policy, reward models and reward functions run on the ranks that train."""

    train: str = ""
    """Ranks that train, as `first-last`, such as 0-3. They begin at rank 0, which writes log and checkpoints.
    Empty: every rank trains and generates in turn."""
    rollout: str = ""
    """Ranks that generate, as `first-last`: all ranks after `roles.train`, for example `16-63`."""
    lag: Annotated[int, NOT_NEGATIVE] = 1
    """Maximum age of a token: the number of versions between the weights that sampled it and the weights that
    learn from it. 0: generators wait for the weights of every step, as in a run without roles. 1: they
    generate the next batch while the trainers learn from this one. Above 0, sets
    rollout_correction.truncate_tokens to 2 if the section has no other key."""
    granularity: Literal["batch", "turn", "group", "sample"] = "batch"
    """When generators continue. batch: they take new weights and prompts when all samples of the present
    prompts are complete. group and sample: they take new weights between two engine steps, and a further
    group or sample begins when one ends; the tokens of a sample then come from several versions. turn: as
    group, but a replica first lets the turns in progress end, so each turn of a trajectory is of one
    version."""
    cache: Literal["recompute", "keep"] = "recompute"
    """All but batch: KV cache of samples in progress when new weights arrive. recompute: it is computed
    again. keep: the keys and values of older weights are kept."""
    refit_after_steps: Annotated[int, NOT_NEGATIVE] = 64
    """All but batch, with `rollout.deterministic`: number of engine steps from the end of a replica's last
    sample of a batch until it takes the weights that learned from this batch. Best is about the number of
    engine steps during one update of the trainers."""
    min_replicas: Annotated[int, NOT_NEGATIVE] = 0
    """Minimum number of live replicas. If a replica dies, the others generate its groups, and the run goes on
    without it until its next start. 0: all must live."""

    @property
    def is_on(self) -> bool:
        return bool(self.train or self.rollout)
