"""The training grid: Megatron's process groups and this rank's position in them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rl.models.placement import training_ranks


@dataclass(frozen=True)
class Grid:
    """World = tp x dp x pp in the order of `rl.models.placement.training_ranks`.

    For routed experts the same ranks are etp x ep x (expert data parallel) x pp.
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

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def reports_results(self) -> bool:
        """Whether this rank reports results for its data parallel replica.

        It is the first tensor parallel rank of the last stage.
        """
        return self.is_last_stage and self.tp_rank == 0


def build_grid(*, tp: int, pp: int, ep: int = 1, etp: int | None = None, seed: int) -> Grid:
    """Create Megatron's groups and seed its RNG tracker; etp=None means tp. Collective over the world."""
    etp = etp or tp
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=torch.cuda.is_available(),  # on CPU all groups use gloo
    )
    model_parallel_cuda_manual_seed(seed)
    grid = Grid(
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        tp=tp,
        pp=pp,
        dp=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep=ep,
        etp=etp,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
    )
    world, rank = dist.get_world_size(), dist.get_rank()
    place = grid.pp_rank, grid.dp_rank, 0, grid.tp_rank
    of_experts = grid.pp_rank, parallel_state.get_expert_data_parallel_rank(), grid.ep_rank, grid.etp_rank
    assert training_ranks(world, tp=tp, pp=pp)[place] == rank, "Megatron's ranks have another order"
    assert training_ranks(world, tp=etp, pp=pp, ep=ep)[of_experts] == rank, "or those of its experts have"
    return grid
