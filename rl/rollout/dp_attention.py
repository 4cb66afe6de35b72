"""Data parallel attention: replicas that share experts and step together (`rollout.dp_attention`).

Each replica of `rollout.tp` ranks has its own requests, scheduler and KV cache, and computes attention and
dense layers alone. `rollout.ep` / `rollout.tp` adjacent replicas hold one copy of the experts: for example, 4
replicas with ep=8 and tp=2. In a mixture every rank receives the tokens of all these replicas, computes the
outputs of its experts, and sends the outputs back. The replicas must therefore run each forward pass
together. They agree on whether one of them has requests. A replica without requests then takes a dummy step,
and its event log counts the step. A replica that has finished takes dummy steps until all have finished.

Before a forward pass vLLM sends a message with the tokens of each replica. The agreement on the next step
travels in it. With `rollout.async_scheduling` the GPU then still computes the step before. Only if no replica
takes a step, the agreement is a message of its own.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rl.rollout import cpu_support
from rl.rollout.expert_parallel import ExpertParallel
from rl.runtime.replacement import replace_attribute

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

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
            disable_nccl_for_dp_synchronization=True,  # a message on the CPU waits for no kernel
        )

    def built(self, engine: "RolloutEngine") -> None:
        from vllm.distributed.parallel_state import get_dp_group
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        super().built(engine)
        self._message, self._group = _message(), get_dp_group().cpu_group
        self._computes_empty_steps = isinstance(engine.runner, GPUModelRunner)
        """Whether vLLM's runner computes a dummy token if no request has a token to compute, as vLLM's older
        runner does. Requests have none if all end with the tokens of the step in flight."""
        core: Any = engine.llm.llm_engine.engine_core
        core.engine_core.post_step = self._after_step(core.engine_core)

    def begin(self, engine: "RolloutEngine") -> None:
        self._message.sums = [0, 1]

    def step_together(self, engine: "RolloutEngine", steps: bool) -> bool:
        self._message.counts = [int(steps), 1]
        if not self._message.sums[0]:
            self._message.all_reduce(torch.zeros(0, dtype=torch.int32), group=self._group)
        return self._message.sums[0] > 0

    def end(self, engine: "RolloutEngine") -> None:
        self._message.counts = [0, 0]
        while self._message.sums[1]:
            if self._message.sums[0]:
                engine.dummy_step()
            else:
                self._message.all_reduce(torch.zeros(0, dtype=torch.int32), group=self._group)

    def _after_step(self, core: "EngineCore") -> Callable[[bool], None]:
        """Return the function that vLLM calls after a step, with whether the model computed tokens."""
        finish = core.post_step

        def post_step(model_executed: bool) -> None:
            finish(model_executed)
            is_drained = not core.scheduler.has_requests()  # only the output of a step in flight was taken
            if not model_executed and not is_drained and not self._computes_empty_steps:
                core.execute_dummy_batch()

        return post_step


class StepMessage:
    """vLLM's message before a forward pass, with two counts of the agreement on the next step behind it.

    It takes the place of torch.distributed in the modules of vLLM that send the message. A step that sends
    several, such as one for draft tokens, sends the same counts again.
    """

    counts = [0, 0]
    """1 if this replica has requests to compute; 1 if it may get others."""
    sums = [0, 0]
    """Sums of the last message's counts over the replicas, known to all of them."""

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Sum a tensor on the CPU, int32, and the counts over the group. Collective over it."""
        message = torch.cat([tensor.flatten(), torch.tensor(self.counts, dtype=tensor.dtype)])
        dist.all_reduce(message, group=group)
        tensor.copy_(message[:-2].view_as(tensor))
        self.sums = message[-2:].tolist()


@functools.cache
def _message() -> StepMessage:
    """Return the message of all engines of this process, which vLLM's two runners send from now on."""
    from vllm.v1.worker import dp_utils
    from vllm.v1.worker.gpu import dp_utils as newer

    message = StepMessage()
    for module in (dp_utils, newer):
        replace_attribute(module, "dist", message)
    return message


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
