"""The grids of a run: the parallel sizes of training and generation, and where weights are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rl.config.role_checks import role_ranks
from rl.config.schema import Config
from rl.dry_run.shape import ModelShape
from rl.models import by_class
from rl.models.placement import RolloutPlacement, TrainingPlacement


@dataclass(frozen=True)
class Layout:
    """The grids of a run."""

    num_ranks: int
    """Ranks of the job."""
    world_size: int
    """Ranks that train."""
    rollout_size: int
    """Ranks that generate; with `roles` other ones."""
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    rollout_tp: int
    rollout_ep: int
    """Ranks over which the engine spreads whole experts; 1: each expert is split over `rollout_tp`."""
    sequence_parallel: bool
    vpp: int = 1
    shard: int = 1
    """Ranks that share one copy of models that their classes compute (`training.shard`)."""

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def sharded_over(self) -> int:
        """Number of ranks that hold a weight outside of routed experts, over which its optimizer state is
        sharded."""
        return self.dp * self.cp // self.shard

    @property
    def expert_dp(self) -> int:
        """Number of replicas of a routed expert within a stage."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def replicas(self) -> int:
        return self.rollout_size // self.rollout_tp

    @property
    def rollout_sharing(self) -> int:
        """Number of replicas that share one copy of the experts."""
        return max(1, self.rollout_ep // self.rollout_tp)

    @property
    def is_split(self) -> bool:
        """Whether other ranks generate than train."""
        return self.world_size < self.num_ranks

    def placement(self, model: ModelShape) -> TrainingPlacement:
        """Return the placement of the model's weights in training."""
        return TrainingPlacement(
            self.world_size,
            self.tp * self.shard,
            self.pp,
            model.num_layers,
            ep=self.ep,
            etp=self.etp if model.num_experts else None,
            num_experts=model.num_experts,
            vpp=self.vpp,
        )

    def rollout_placement(self, model: ModelShape) -> RolloutPlacement:
        """Return the placement of the model's weights in generation."""
        ranks = tuple(range(self.world_size, self.num_ranks)) if self.is_split else None
        return RolloutPlacement(
            self.rollout_size,
            self.rollout_tp,
            model.num_layers,
            ep=self.rollout_ep if model.num_experts else 1,
            num_experts=model.num_experts,
            ranks=ranks,
        )


def layout_of(
    config: Config, world_size: int, ranks_per_node: int, models: Mapping[str, ModelShape]
) -> Layout:
    """Return the grids of the config on that number of ranks. models: of the run."""
    t = config.training
    train, rollout = map(len, role_ranks(config, world_size))
    grids = t.tp, t.pp, t.cp, t.ep, t.expert_tp, config.rollout.tp, config.rollout.ep
    shard = by_class.ranks_per_copy(
        t.shard,
        [(model.hf, bool(model.run.head)) for model in models.values() if model.run.on_training_grid],
        math.gcd(train, ranks_per_node),
    )
    return Layout(world_size, train, rollout, *grids, t.sequence_parallel, vpp=t.vpp, shard=shard)
