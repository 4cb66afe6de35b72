"""Construction of vLLM inside a training process: its options, and what it must not change there."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rl.config.schema import Rollout
from rl.models import SUPPORTED, read_hf_config
from rl.runtime.device import Device


def build_llm(
    path: str, rollout: Rollout, *, dtype: str, max_tokens: int, seed: int, device: Device, frozen: bool
):
    """Return vLLM's LLM object for the checkpoint directory `path`. Collective over the world.

    Args as of `RolloutEngine`. Random states, environment and thread count of the process stay as they were.
    """
    from vllm import LLM, ModelRegistry

    hf = read_hf_config(path)
    for name in set(hf["architectures"]) & set(SUPPORTED):
        # A registered class saves a subprocess of about 10 s, in which vLLM inspects the model's class.
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
    else:
        options |= dict(
            enforce_eager=True,
            kv_cache_memory_bytes=rollout.cpu_kv_cache_mib << 20,
            # vLLM's CPU rotary kernel is wrong for 3-dimensional queries (DeepSeek).
            compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
        )
        if "kv_lora_rank" in hf:  # the default backend on hosts with AMX removes kv_b_proj.weight
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
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            seed=seed,
            disable_log_stats=True,
            # By default vLLM turns asynchronous scheduling on for CUDA and off for CPU. It schedules one step
            # ahead: finishes are seen one step late, and `generate` returns or aborts with a step in flight
            # when the trainer takes the memory. Ranks of external_launcher diverged with it on (vLLM #28774).
            # Without it CUDA runs the loop whose steps the tests compare between ranks.
            async_scheduling=False,
            **options,
        )


@contextmanager
def _process_state_kept(device: Device) -> Iterator[None]:
    """Restore what vLLM's constructor changes: it seeds every generator, sets LOCAL_WORLD_SIZE and replaces
    torch.set_num_threads. It takes its GPU from LOCAL_RANK, which differs where each rank sees one GPU only
    (srun --gpus-per-task).
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
