"""The platforms of a generation engine, each with its vLLM options and its way to release memory."""

import os
import shutil
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from rl.config.options import ConfigError
from rl.config.rollout import Rollout
from rl.rollout import cpu_support
from rl.rollout.calls import EngineCall
from rl.rollout.compilation import graph_sizes, replace_cache_files
from rl.rollout.parts import EnginePart
from rl.rollout.samples import Request
from rl.runtime import start_up

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

    from rl.rollout.engine import RolloutEngine


class Platform(EnginePart):
    """The first part of every engine."""

    def logprobs_so_far(self, engine: "RolloutEngine", internal_id: str) -> list[float]:
        """Return the log-probs of a running request's tokens."""
        from vllm.logprobs import FlatLogprobs

        processor = engine.llm.llm_engine.output_processor.request_states[internal_id].logprobs_processor
        assert processor is not None and isinstance(processor.logprobs, FlatLogprobs)
        return processor.logprobs.logprobs

    def logprobs_of(
        self, engine: "RolloutEngine", internal_id: str, output: "CompletionOutput"
    ) -> list[float]:
        """Return the log-probs of a finished request's tokens. output: vLLM's, of the request."""
        from vllm.logprobs import FlatLogprobs

        assert isinstance(output.logprobs, FlatLogprobs)
        return output.logprobs.logprobs

    def draft_options(self, engine: "RolloutEngine", speculation: dict) -> dict:
        """Return arguments of LLM for an engine with draft tokens. speculation: of its SpeculativeConfig."""
        raise NotImplementedError

    def drafter(self, engine: "RolloutEngine") -> Any:
        """Return vLLM's object that proposes draft tokens. Its `model` is the draft model."""
        raise NotImplementedError

    def verify_drafts(self, engine: "RolloutEngine") -> None:
        """Replace vLLM's sampling and verification of drafts where their distribution is wrong."""

    def switch_drafts(self, engine: "RolloutEngine", *, on: bool) -> None:
        """Turn the proposal of draft tokens on or off for the following engine steps.

        In steps without proposals the draft model does not run, so its KV cache has gaps for their tokens.
        """
        raise NotImplementedError

    def weights_written(self, model: nn.Module) -> None:
        """Discard what was computed from the weights of a model of the engine."""

    def weights_changed(self, engine: "RolloutEngine") -> None:
        self.weights_written(engine.model)


def _choose_all_reduce(config: Rollout) -> None:
    """Set vLLM's variable for FlashInfer's all-reduce. Raises ConfigError if its compiler is missing."""
    wanted = config.tp > 1 and config.flashinfer_all_reduce
    missing = [tool for tool in ("nvcc", "ninja") if shutil.which(tool) is None] if wanted else []
    if missing:
        raise ConfigError(
            f"rollout.flashinfer_all_reduce=true compiles a kernel in the job, but PATH has no "
            f"{' and no '.join(missing)}; load the CUDA toolkit, or leave the key out."
        )
    os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = str(int(wanted))


def _compilation(config: Rollout, sizes: list[int]) -> dict:
    """Return vLLM's compilation config. sizes: tokens per step of each CUDA graph."""
    passes = {} if config.flashinfer_all_reduce else {"pass_config": {"fuse_allreduce_rms": False}}
    return {"cudagraph_capture_sizes": sizes} | passes


class Cuda(Platform):
    """vLLM on a GPU. Its sleep mode releases the memory of engines that are refitted."""

    def options(self, engine: "RolloutEngine") -> dict:
        from vllm.engine.arg_utils import EngineArgs

        is_frozen, is_eager = engine.frozen, engine.config.enforce_eager
        _choose_all_reduce(engine.config)
        options: dict = {}
        if "sleep_mode_offload_cudagraph" in EngineArgs.__dataclass_fields__:  # not in vLLM 0.25
            # CUDA graphs move to host memory during sleep, so that the trainer can use their memory.
            options["sleep_mode_offload_cudagraph"] = not is_frozen and not is_eager
        replace_cache_files()
        return options | dict(
            enable_sleep_mode=not is_frozen,
            enforce_eager=is_eager,
            compilation_config=_compilation(engine.config, graph_sizes(engine.config.max_concurrent_samples)),
            # FlashInfer's kernels reorder the experts' weights in place without a change of shape. A refit
            # would write them in the checkpoint's order, without any error. Triton's kernels use that order.
            moe_backend="auto" if is_frozen else "triton",
            gpu_memory_utilization=engine.config.gpu_memory_utilization,
        )

    def built(self, engine: "RolloutEngine") -> None:
        compiled = engine.llm.llm_engine.model_executor.vllm_config.compilation_config
        start_up.count("compilation", compiled.compilation_time)

    def request(self, engine: "RolloutEngine", request: Request, call: EngineCall) -> None:
        call.params.seed = request.seed

    def draft_options(self, engine: "RolloutEngine", speculation: dict) -> dict:
        per_sample = 1 + speculation["num_speculative_tokens"]
        sizes = [per_sample * size for size in graph_sizes(engine.config.max_concurrent_samples)]  # in tokens
        return {
            "compilation_config": _compilation(engine.config, sizes),
            # At the temperatures of RL a sampled draft is accepted more often than the most probable one.
            "speculative_config": speculation | {"draft_sample_method": "probabilistic"},
        }

    def drafter(self, engine: "RolloutEngine") -> Any:
        return engine.runner.speculator

    def switch_drafts(self, engine: "RolloutEngine", *, on: bool) -> None:
        drafter, scheduler = engine.runner.speculator, engine.scheduler
        drafter.__dict__.pop("propose", None)
        # vLLM's table: number of requests in a step -> number of tokens to propose; None: always all.
        scheduler.dynamic_sd_lookup = None
        if not on:
            scheduler.dynamic_sd_lookup = [0] * (scheduler.max_num_running_reqs + 1)
            drafter.propose = lambda batch, *_, **__: drafter.draft_tokens[: batch.num_reqs]

    def sleep(self, engine: "RolloutEngine") -> None:
        if not engine.frozen:
            engine.llm.sleep(level=2)  # discards the weights; level 1 copies them to the host and back

    def wake(self, engine: "RolloutEngine", what: str) -> None:
        if not engine.frozen:
            engine.llm.wake_up(tags=[what])


MLA_BACKEND = "CPU_MLA"
"""vLLM's attention backend for MLA on a CPU.

vLLM's other backend, the default on hosts with AMX, removes kv_b_proj.weight and does not support float32.
"""


CACHE_BLOCK = 32
"""Tokens of a block of the KV cache on a CPU, the smallest number that vLLM's kernels take.

Samples of a prompt share its whole blocks. With vLLM's default of 128, the eight samples of a prompt of 109
tokens share nothing, and the prompt is computed eight times.
"""


class Cpu(Platform):
    """vLLM's CPU build, with the sampler and the scheduler of this program."""

    def options(self, engine: "RolloutEngine") -> dict:
        options: dict = dict(
            enforce_eager=True,
            kv_cache_memory_bytes=engine.config.cpu_kv_cache_mib << 20,
            block_size=CACHE_BLOCK,
            scheduler_cls="rl.rollout.cpu_scheduler.DecodeScheduler",
            compilation_config={"custom_ops": ["all"]},
        )
        if "kv_lora_rank" in engine.hf:
            # vLLM's CPU rotary kernel is wrong for 3-dimensional queries.
            options["compilation_config"]["custom_ops"].append("-rotary_embedding")
            options["attention_backend"] = MLA_BACKEND
            del options["block_size"]  # the backend has its own
        return options

    def built(self, engine: "RolloutEngine") -> None:
        from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer

        from rl.rollout.cpu_sampler import HashedSampler

        if any(isinstance(part, MambaMixer) for part in engine.model.modules()):
            raise ConfigError(
                f"architectures={engine.hf['architectures'][0]} in config.json: vLLM's build for CPUs has no "
                "kernel for states of the first Mamba; use a GPU, or another model."
            )
        dist.barrier()
        cpu_support.unlink_shared_memory()
        self.cache = cpu_support.KvCache(engine.runner.kv_caches)
        engine.runner.sampler = HashedSampler(engine.runner)

    def draft_options(self, engine: "RolloutEngine", speculation: dict) -> dict:
        scheduler = "rl.rollout.cpu_scheduler.CpuScheduler"  # DecodeScheduler schedules no drafts
        # The draft model's layers do not inherit the engine's backend. Layers without MLA ignore this option.
        return {
            "scheduler_cls": scheduler,
            "speculative_config": speculation | {"attention_backend": MLA_BACKEND},
        }

    def drafter(self, engine: "RolloutEngine") -> Any:
        return engine.runner.drafter

    def verify_drafts(self, engine: "RolloutEngine") -> None:
        from rl.rollout import cpu_drafts

        cpu_drafts.install(engine.runner)

    def switch_drafts(self, engine: "RolloutEngine", *, on: bool) -> None:
        from rl.rollout import cpu_drafts

        drafter = engine.runner.drafter
        drafter.__dict__.pop("propose", None)
        if not on:
            drafter.propose = cpu_drafts.propose_nothing

    def weights_written(self, model: nn.Module) -> None:
        cpu_support.release_packed_weights(model)

    def sleep(self, engine: "RolloutEngine") -> None:
        if not engine.keeps_cache:
            self.cache.release()
        cpu_support.release_packed_weights(engine.model)

    def wake(self, engine: "RolloutEngine", what: str) -> None:
        if what == "kv_cache":
            self.cache.restore()

    def logprobs_so_far(self, engine: "RolloutEngine", internal_id: str) -> list[float]:
        # This scheduler reports tokens only at the end of a request, vLLM's after each step.
        logprobs = engine.scheduler.logprobs.get(internal_id)
        return super().logprobs_so_far(engine, internal_id) if logprobs is None else logprobs

    def logprobs_of(
        self, engine: "RolloutEngine", internal_id: str, output: "CompletionOutput"
    ) -> list[float]:
        logprobs = engine.scheduler.logprobs.pop(internal_id, None)
        return super().logprobs_of(engine, internal_id, output) if logprobs is None else logprobs
