"""Expert parallelism in the engine: each rank of a replica holds whole experts (`rollout.ep`).

The attention is tensor parallel. Every rank has all tokens of a step and computes the outputs of its experts;
vLLM adds the outputs over the ranks. Rank i of `rollout.ep` adjacent ranks holds E/ep experts from number i
E/ep on, as in `rl.models.placement.RolloutPlacement` for the refit. For example, with 128 experts and ep=8
rank 1 holds the experts 16 to 31.
"""

from typing import TYPE_CHECKING

import torch.distributed as dist

from rl.rollout.parts import EnginePart

if TYPE_CHECKING:
    from rl.rollout.engine import RolloutEngine


class ExpertParallel(EnginePart):
    """Makes vLLM place whole experts on ranks, and checks that it places them as the refit does."""

    def options(self, engine: "RolloutEngine") -> dict:
        return {"enable_expert_parallel": True}

    def built(self, engine: "RolloutEngine") -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        placement = engine.placement
        per_rank = placement.num_experts // placement.ep
        first = dist.get_rank() % placement.ep * per_rank
        expected = [n - first if first <= n < first + per_rank else -1 for n in range(placement.num_experts)]
        for name, module in engine.model.named_modules():
            if isinstance(module, RoutedExperts):
                assert module.expert_map is not None and module.expert_map.tolist() == expected, (
                    f"{name} has other experts: {module.expert_map}"
                )
