"""Data parallel attention: replicas that share experts and step together (`rollout.dp_attention`).

Each replica of `rollout.tp` ranks has its own requests, scheduler and KV cache, and computes attention and
dense layers alone. `rollout.ep` / `rollout.tp` adjacent replicas hold one copy of the experts: for example, 4
replicas with ep=8 and tp=2. In a mixture every rank receives the tokens of all these replicas, computes the
outputs of its experts, and sends the outputs back. The replicas must therefore run each forward pass
together. Before each engine step they agree on whether one of them has requests. A replica without requests
then takes a dummy step, and its event log counts the step. A replica that has finished takes dummy steps
until all have finished.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rl.rollout import cpu_support
from rl.rollout.expert_parallel import ExpertParallel
from rl.runtime.replacement import replace_attribute

if TYPE_CHECKING:
    from rl.rollout.engine import RolloutEngine

BATCHED_TOKENS = 16384
"""Maximum tokens of an engine step of replicas that share experts: vLLM's default for one replica."""


class DataParallelAttention(ExpertParallel):
    """Makes vLLM gather the tokens of several replicas for the experts, and keeps the replicas in step."""

    def options(self, engine: "RolloutEngine") -> dict:
        cpu_support.add_collectives_of_experts()
        cpu_support.clear_attention_of_dummy_steps()
        _keep_all_tokens_between_layers()
        replicas = engine.placement.ep // engine.tp
        # The experts' memory of a step grows with the tokens of all replicas.
        tokens = max(BATCHED_TOKENS // replicas, engine.config.max_concurrent_samples)
        return super().options(engine) | dict(
            data_parallel_size=replicas,
            max_num_batched_tokens=tokens,
            async_scheduling=False,  # an engine step must be one forward pass on every rank
        )

    def built(self, engine: "RolloutEngine") -> None:
        from vllm.distributed.parallel_state import get_dp_group

        super().built(engine)
        self._group = get_dp_group().cpu_group

    def step_together(self, engine: "RolloutEngine", steps: bool) -> bool:
        return self._agree(engine, steps=steps, goes_on=True)

    def end(self, engine: "RolloutEngine") -> None:
        while not self._all_done:
            self._agree(engine, steps=False, goes_on=False)

    def begin(self, engine: "RolloutEngine") -> None:
        self._all_done = False

    def _agree(self, engine: "RolloutEngine", *, steps: bool, goes_on: bool) -> bool:
        """Return whether this replica took a dummy step. Collective over the replicas' ranks."""
        counts = torch.tensor([int(steps), int(goes_on)])
        dist.all_reduce(counts, group=self._group)
        num_steps, num_going_on = counts.tolist()
        self._all_done = not num_going_on
        if steps or not num_steps:
            return False
        engine.llm.llm_engine.engine_core.execute_dummy_batch()
        engine.events.note_dummy_step()
        return True


@functools.cache
def _keep_all_tokens_between_layers() -> None:
    """Make vLLM's layers of DeepSeek-V2 and V3 give every rank of a replica the outputs of all tokens.

    If replicas of several ranks share experts, vLLM leaves each rank with its part of the tokens. The next
    layer infers from the number of rows whether its input is a part or all tokens. In a step of one token, a
    part and all tokens both have one row. The next layer then takes a rank's padding for the token, and the
    log-probs are wrong (vLLM #50154). The remedy sums the attention's outputs over all tokens, which moves
    1.5 times as many bytes between a replica's ranks.
    """
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer

    build = DeepseekV2DecoderLayer.__init__

    def build_with_all_tokens(self: DeepseekV2DecoderLayer, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        if self.use_sequence_parallel_moe:
            self.use_sequence_parallel_moe = False  # the mixture takes its part, and gathers its outputs
            self.self_attn.o_proj.reduce_results = True

    replace_attribute(DeepseekV2DecoderLayer, "__init__", build_with_all_tokens)
