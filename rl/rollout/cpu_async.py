"""Asynchronous scheduling in vLLM's CPU build.

The CPU build turns this option off, because asynchronous scheduling saves nothing on a CPU. With this patch
the CPU engine runs the same loop as the CUDA engine: each step is scheduled, and given to the model, before
the tokens of the previous step are processed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsTensors, ModelRunnerOutput
from vllm.v1.worker import cpu_model_runner, gpu_model_runner

from rl.runtime.replacement import replace_attribute


def install() -> None:
    """Make the CPU build obey vLLM's option `async_scheduling`."""
    check, without_streams = CpuPlatform.check_and_update_config, cpu_model_runner._torch_cuda_wrapper

    def check_and_update_config(vllm_config: VllmConfig) -> None:
        is_async = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = bool(is_async)

    @contextmanager
    def without_streams_and_events() -> Iterator[None]:
        event = torch.cuda.Event
        replace_attribute(torch.cuda, "Event", NoEvent)
        try:
            with without_streams():
                yield
        finally:
            replace_attribute(torch.cuda, "Event", event)

    assert issubclass(gpu_model_runner.AsyncGPUModelRunnerOutput, AsyncModelRunnerOutput)
    replace_attribute(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))
    replace_attribute(cpu_model_runner, "_torch_cuda_wrapper", without_streams_and_events)
    replace_attribute(gpu_model_runner, "AsyncGPUModelRunnerOutput", StepOutput)


class NoEvent:
    """Stands for a CUDA event: on a CPU every operation has ended when it returns."""

    def __init__(self, **_: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class StepOutput(AsyncModelRunnerOutput):
    """The output of a step; the scheduler reads it later. Replaces AsyncGPUModelRunnerOutput."""

    def __init__(
        self,
        *,
        model_runner_output: ModelRunnerOutput,
        sampled_token_ids: torch.Tensor,
        logprobs_tensors: LogprobsTensors | None,
        invalid_req_indices: list[int],
        **_: Any,
    ) -> None:
        self.sampled_token_ids_cpu, self.async_copy_ready_event = sampled_token_ids, NoEvent()
        self.output, self._logprobs = model_runner_output, logprobs_tensors
        self._invalid = invalid_req_indices

    def get_output(self) -> ModelRunnerOutput:
        """Return the output with tokens and log-probs; no tokens for chunks of prompts."""
        tokens = self.sampled_token_ids_cpu.tolist()
        for row in self._invalid:
            tokens[row].clear()
        self.output.sampled_token_ids = tokens
        self.output.logprobs = None if self._logprobs is None else self._logprobs.tolists()
        return self.output
