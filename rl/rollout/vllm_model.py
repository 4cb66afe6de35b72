"""Construction of vLLM inside a training process: its options, and the process state that it must keep."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rl.config.options import ConfigError
from rl.config.rollout import Rollout
from rl.models import SUPPORTED, read_hf_config
from rl.rollout import router
from rl.runtime.device import Device


def build_llm(
    path: str,
    rollout: Rollout,
    *,
    dtype: str,
    max_tokens: int,
    seed: int,
    device: Device,
    frozen: bool,
    bitwise: bool = False,
    returns_masks: bool = False,
    routes: bool = False,
    **more,
):
    """Return vLLM's LLM object for the checkpoint directory `path`. Collective over the world.

    The arguments are those of `RolloutEngine`, and further options of vLLM. Random states, environment and
    thread count of the process are unchanged afterwards.
    """
    from vllm import LLM, ModelRegistry
    from vllm.engine.arg_utils import EngineArgs

    router.install()
    hf = read_hf_config(path)
    for name in set(hf["architectures"]) & set(SUPPORTED):
        # Otherwise vLLM inspects the model's class in a subprocess, which takes about 10 s.
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    options: dict = {}
    if not frozen and hf.get("quantization_config"):
        options["hf_overrides"] = {
            "quantization_config": None
        }  # refits write the trainer's unquantised weights
    if device.is_cuda:
        options |= dict(
            enable_sleep_mode=not frozen,
            enforce_eager=rollout.enforce_eager,
            # FlashInfer's kernels reorder the experts' weights in place without a change of shape. A refit
            # would write them in the checkpoint's order, without any error. Triton's kernels use that order.
            moe_backend="auto" if frozen else "triton",
            gpu_memory_utilization=rollout.gpu_memory_utilization,
        )
        if (
            bitwise
        ):  # `rl.rollout.bitwise_numerics` reads lengths on the host and knows the cache of this backend
            options["enforce_eager"] = True
            if "kv_lora_rank" not in hf:
                options["attention_backend"] = "TRITON_ATTN"
        if "sleep_mode_offload_cudagraph" in EngineArgs.__dataclass_fields__:  # not in vLLM 0.25
            # CUDA graphs move to host memory during sleep, so that the trainer can use their memory.
            options["sleep_mode_offload_cudagraph"] = not frozen and not rollout.enforce_eager
        if returns_masks:
            # vLLM raises an error if it would use its first model runner, which does not return the masks.
            options |= _mask_option(EngineArgs.__dataclass_fields__)
    else:
        options |= dict(
            enforce_eager=True,
            kv_cache_memory_bytes=rollout.cpu_kv_cache_mib << 20,
            scheduler_cls="rl.rollout.cpu_scheduler.DecodeScheduler",
            compilation_config={"custom_ops": ["all"]},
        )
        if "kv_lora_rank" in hf:
            # vLLM's CPU rotary kernel is wrong for 3-dimensional queries.
            options["compilation_config"]["custom_ops"].append("-rotary_embedding")
            # The default backend on hosts with AMX removes kv_b_proj.weight.
            options["attention_backend"] = "CPU_MLA"
    with _process_state_kept(device):
        return LLM(
            path,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=rollout.tp,
            dtype=dtype,
            load_format="auto" if frozen else "dummy",  # the first refit writes every weight
            max_model_len=max_tokens,
            max_num_seqs=rollout.max_concurrent_samples,
            logprobs_mode="processed_logprobs",  # log-probs of the sampling distribution
            seed=seed,
            disable_log_stats=True,
            # By default vLLM enables asynchronous scheduling on CUDA and disables it on CPU. It schedules one
            # step ahead, so a finished response is seen one step late, and `generate` could return or abort
            # with a step in flight while the trainer takes the memory. With it, ranks of external_launcher
            # diverged (vLLM #28774). Without it, CUDA runs the loop that the tests compare between ranks.
            async_scheduling=False,
            enable_return_routed_experts=routes and device.is_cuda,  # on CPU `rl.rollout.routes.CpuRoutes`
            **options,
            **more,
        )


def _mask_option(known) -> dict[str, bool]:
    """Return the option with which completions have sampling masks. known: names of vLLM's options."""
    if "return_sampling_mask" not in known:
        raise ConfigError(
            "rollout.top_p, top_k or min_p truncates the distribution, but this vLLM does not return the "
            "tokens that it kept; use vLLM 0.32, or rollout.biased_truncation=true."
        )
    return {"return_sampling_mask": True}


@contextmanager
def _process_state_kept(device: Device) -> Iterator[None]:
    """Restore the process state that vLLM's constructor changes.

    The constructor seeds every generator, sets LOCAL_WORLD_SIZE and replaces torch.set_num_threads. It
    selects its GPU by LOCAL_RANK, which is the wrong index if each rank sees only one GPU (srun
    --gpus-per-task). LOCAL_RANK is therefore set to the device's index inside the context.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    environment = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    set_num_threads = torch.set_num_threads
    if device.is_cuda:
        os.environ["LOCAL_RANK"] = str(device.torch.index)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_num_threads = set_num_threads
    os.environ.update(environment)
