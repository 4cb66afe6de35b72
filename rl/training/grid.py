"""The training grid: Megatron's process groups and this rank's position in them.

`rl.models.placement` defines the order of the ranks.
"""

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rl.models.placement import context_ranks, training_ranks

if TYPE_CHECKING:
    from rl.training.context_parallel import ContextGroup


@dataclass(frozen=True)
class Grid:
    """World = tp x cp x dp x pp in the order of `rl.models.placement.training_ranks`.

    For routed experts the same ranks are etp x ep x (expert data parallel) x pp. The cp ranks of a context
    parallel group share the samples of one data parallel rank. Megatron counts each of the cp ranks as a data
    parallel rank. For example, 8 ranks with training.tp=2, training.cp=2 and training.pp=1 have dp=2.
    """

    groups: ProcessGroupCollection
    tp: int
    pp: int
    dp: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    ep: int = 1
    etp: int = 1
    ep_rank: int = 0
    etp_rank: int = 0
    vpp: int = 1
    """Number of chunks of a model on this rank. A micro-batch passes the other stages between two chunks of
    this rank (`rl.training.interleaved`)."""
    context: "ContextGroup | None" = None
    """Context parallel group; None with cp=1, because each rank then holds whole rows."""

    @property
    def sharing(self) -> str:
        """Sizes of the groups of ranks that share a sample, such as "tp=2, cp=2", for messages."""
        sizes = dict(tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep)
        return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)

    @property
    def cp(self) -> int:
        return 1 if self.context is None else self.context.size

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same part of a weight outside of routed experts: dp x cp."""
        return self.dp * self.cp

    @property
    def replica(self) -> int:
        """Number of this rank among the `replicas` that hold the same weights, 0 to replicas - 1."""
        return self.dp_rank if self.context is None else self.dp_rank * self.cp + self.context.rank

    def with_shards(self) -> "Grid":
        """Return the grid of the weights of a model that its class computes (`training.shard`).

        Every rank of it has its own samples, but `etp` ranks share a copy of all weights: they take the place
        of tensor parallel ranks. With etp=1 Megatron reduces all gradients in the group `dp_cp`.
        """
        groups = copy.copy(self.groups)
        if self.etp == 1:
            groups.expt_dp = groups.dp_cp
        else:
            groups.tp, groups.dp_cp = groups.expt_tp, groups.expt_dp
        place = dict(tp=self.etp, tp_rank=self.etp_rank, dp_rank=groups.expt_dp.rank())
        return replace(self, groups=groups, dp=groups.expt_dp.size(), **place)

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches of a pass must be a multiple of this (`rl.training.interleaved`)."""
        return self.pp if self.vpp > 1 else 1

    def step_groups(self, *, has_experts: bool, ties_embedding: bool) -> list[dist.ProcessGroup]:
        """Return the groups on which a step communicates, besides the world and the control group.

        Megatron also makes groups on which no step communicates; several have the same ranks. The arguments
        are true if they are true of any model on the grid. `rl.models.placement.num_step_groups` counts the
        groups of several ranks.
        """
        groups = self.groups
        # The last is for the norm of the gradients.
        found = [groups.tp, groups.pp, groups.dp_cp, groups.intra_dist_opt]
        if has_experts:
            found += [groups.ep, groups.expt_tp, groups.tp_ep, groups.expt_dp]
        if ties_embedding and self.pp > 1:
            found.append(groups.embd)  # None on ranks without an embedding
        if self.context is not None:
            found.append(self.context.group)
        return [group for group in found if group is not None]

    @property
    def reports_results(self) -> bool:
        """Whether this rank reports results for its data parallel replica.

        True on the first tensor and context parallel rank of the last stage.
        """
        is_first = self.context is None or self.context.rank == 0
        return self.is_last_stage and self.tp_rank == 0 and is_first


def build_grid(
    *, tp: int, pp: int, cp: int = 1, ep: int = 1, etp: int | None = None, vpp: int = 1, seed: int
) -> Grid:
    """Create Megatron's groups and seed its RNG tracker; etp=None means tp. Collective over the world."""
    etp = etp or tp
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)
    replica = parallel_state.get_data_parallel_rank()
    grid = Grid(
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        tp=tp,
        pp=pp,
        dp=parallel_state.get_data_parallel_world_size() // cp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=replica // cp,
        ep=ep,
        etp=etp,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        vpp=vpp,
        context=_context_group(tp, cp) if cp > 1 else None,
    )
    world, rank = dist.get_world_size(), dist.get_rank()
    place = grid.pp_rank, grid.replica, 0, grid.tp_rank
    of_experts = grid.pp_rank, parallel_state.get_expert_data_parallel_rank(), grid.ep_rank, grid.etp_rank
    assert training_ranks(world, tp=tp, pp=pp)[place] == rank, "Megatron's ranks have another order"
    assert training_ranks(world, tp=etp, pp=pp, ep=ep)[of_experts] == rank, "or those of its experts have"
    return grid


def _context_group(tp: int, cp: int) -> "ContextGroup":
    """Create the context parallel groups and return this rank's group. Collective over the world."""
    from rl.training.context_parallel import ContextGroup

    members = context_ranks(dist.get_world_size(), tp=tp, cp=cp)
    group, _ = dist.new_subgroups_by_enumeration(members.tolist())
    return ContextGroup(cp, group.rank(), group)
