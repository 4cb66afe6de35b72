"""Construction of vLLM inside a training process: its options, and the process state that it must keep."""

import functools
import importlib.util
import os
import random
import re
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from rl.config.options import ConfigError
from rl.config.rollout import Rollout
from rl.faults.fault_board import may_be_secondary
from rl.models import SUPPORTED, by_class, rope
from rl.rollout import router
from rl.runtime.device import Device
from rl.runtime.replacement import replace_attribute

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine.core_client import EngineCoreClient

OF_MACHINE = re.compile("allocate memory|out of memory|CUDA error|No space left", re.IGNORECASE)
"""Pattern in the message of an error that no other model would avoid."""
DERIVED = ("W_UV", "W_UK_T")
"""Last parts of the names of weights that vLLM derives from kv_b_proj.weight of latent attention."""


@dataclass(frozen=True)
class ServedModel:
    """The model of one generation engine."""

    path: str
    """Hugging Face checkpoint directory."""
    dtype: Literal["float32", "bfloat16"]
    """dtype of the weights."""
    max_tokens: int
    """Maximum tokens of prompt and response together."""
    frozen: bool = False
    """Whether the weights are read from `path` and never change. On CUDA they then stay in GPU memory,
    because vLLM's sleep mode supports one engine per process. Other weights are undefined until the first
    refit."""
    rope_scaling: dict = field(default_factory=dict)
    """model.rope_scaling."""


def allow_no_torchvision() -> None:
    """Let vLLM import models that may read images without torchvision, which they need only to read images.

    The models import a function from transformers' image processor for torchvision. The processor for Pillow
    has the same function.
    """
    if importlib.util.find_spec("torchvision") is None:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pillows

        sys.modules.setdefault(pillows.__name__.replace("_pil_", "_"), pillows)


def register(architectures: Iterable[str]) -> None:
    """Import vLLM's classes of these architectures in this process.

    Otherwise vLLM inspects the model's class in a subprocess, which takes about 10 s.
    """
    from vllm import ModelRegistry

    for name in set(architectures) & ModelRegistry.models.keys():
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def build_llm(
    model: ServedModel, hf: dict, rollout: Rollout, *, seed: int, device: Device, options: dict
) -> "LLM":
    """Return vLLM's LLM object of the model. Collective over the world.

    Random states, environment and thread count of the process are unchanged afterwards.

    hf: the model's config.json. options: further arguments of LLM. Others: as in `RolloutEngine`.
    """
    from vllm import LLM

    router.install()
    _keep_classes_of_transformers()
    register(hf["architectures"])
    if "GptOssForCausalLM" in hf["architectures"]:
        from vllm.model_executor.models import gpt_oss

        # vLLM would divide the experts' width by the job's number of ranks; a replica may have fewer ranks.
        replace_attribute(gpt_oss, "dist", types.SimpleNamespace(is_initialized=lambda: False))
    if not model.frozen:
        # Refits write the trainer's unquantised weights, which rotate by the trainer's frequencies.
        unquantised = {"quantization_config": None} if hf.get("quantization_config") else {}
        overrides = rope.engine_fields(hf) | unquantised | options.get("hf_overrides", {})
        options = options | {"hf_overrides": overrides}
    with _process_state_kept(device, rollout), refusals(model.path, hf):
        llm = LLM(
            model.path,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=rollout.tp,
            dtype=model.dtype,
            load_format="auto" if model.frozen else "dummy",  # the first refit writes every weight
            max_model_len=model.max_tokens,
            max_num_seqs=rollout.max_concurrent_samples,
            logprobs_mode="processed_logprobs",  # log-probs of the sampling distribution
            # As the trainer keeps states. In the model's dtype each token would round the state.
            mamba_ssm_cache_dtype="float32",
            seed=seed,
            disable_log_stats=True,
            **{"async_scheduling": rollout.async_scheduling} | options,
        )
    client = llm.llm_engine.engine_core
    # Garbage collection of the LLM would destroy the trainer's default process group (not in vLLM 0.25).
    if finalizer := getattr(client, "_finalizer", None):
        finalizer.detach()
    _abort_in_order(client)
    if not model.frozen and set(hf["architectures"]).isdisjoint(SUPPORTED):  # refits write them
        _add_biases_of_head(llm.apply_model(lambda built: built)[0], hf)
    return llm


@contextmanager
def refusals(path: str, hf: dict) -> Iterator[None]:
    """Raise ConfigError for an error of vLLM where it builds the model in `path`, or computes it."""
    try:
        yield
    except Exception as error:
        frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        of_machine = isinstance(error, MemoryError | torch.OutOfMemoryError) or OF_MACHINE.search(str(error))
        if (
            of_machine
            or may_be_secondary(error)
            or frames.isdisjoint({"create_engine_config", "initialize_model", "execute_model"})
        ):
            raise
        cause = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
        raise ConfigError(
            f"architectures={hf['architectures'][0]} in {path}/config.json: vLLM cannot compute it on "
            f"this device ({cause}); correct config.json, or use another device or model."
        ) from error


@functools.cache
def _keep_classes_of_transformers() -> None:
    """Let classes of transformers that vLLM serves itself be built outside of its engines, for their weights.

    vLLM decorates them, after which building one requires an engine's config. They compute otherwise, too.
    """
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.models.transformers.base import Base

    decorate = Base._decorate_cls_for_torch_compile

    def decorate_for_engines(self: Base, cls: Any, *args: Any, **options: Any) -> None:
        own = cls.__init__
        decorate(self, cls, *args, **options)
        of_engine = cls.__init__

        @functools.wraps(own)
        def build(model: Any, *args: Any, **options: Any) -> None:
            if get_current_vllm_config_or_none() is not None:
                return of_engine(model, *args, **options)
            own(model, *args, **options)
            model.do_not_compile = True

        if of_engine is not own:
            cls.__init__ = build

    replace_attribute(Base, "_decorate_cls_for_torch_compile", decorate_for_engines)


def _add_biases_of_head(model: Any, hf: dict) -> None:
    """Give the head of a class of transformers its biases, which vLLM adds when it loads them (Phi)."""
    from vllm.model_executor.models.transformers.causal import CausalMixin

    if isinstance(model, CausalMixin) and by_class.on_meta(hf).get_output_embeddings().bias is not None:
        _keep_biases_of_heads()
        head: Any = model.lm_head
        with torch.device(head.weight.device):
            head._register_bias()
        head.bias.data.zero_()


@functools.cache
def _keep_biases_of_heads() -> None:
    """Make vLLM load the biases of a head into the tensor that is there, not into a new one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    add = ParallelLMHead._register_bias

    def add_once(head: ParallelLMHead) -> None:
        if getattr(head, "bias", None) is None:
            add(head)

    replace_attribute(ParallelLMHead, "_register_bias", add_once)


@torch.no_grad()
def derive_weights(model: torch.nn.Module) -> None:
    """Derive the weights in DERIVED again, in the same memory, after others have changed."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    for module in model.modules():
        if isinstance(module, MLAAttention):
            weight = module.kv_b_proj.weight
            assert isinstance(weight, torch.Tensor)
            module.process_weights_after_loading(weight.dtype)


def _abort_in_order(client: "EngineCoreClient") -> None:
    """Make vLLM free aborted requests in the given order, identical on all ranks of a replica.

    Within one call vLLM frees requests in the iteration order of a set of strings, and both the ids and the
    hashes of strings are random per process. The order determines which cached prefix is evicted first. If
    ranks evict different prefixes, they later compute different numbers of tokens and their collectives no
    longer match. An interrupt aborts requests, and vLLM aborts every response that ends at a stop string.
    """
    abort = client.abort_requests

    def abort_requests(request_ids: list[str]) -> None:
        for request_id in request_ids:
            abort([request_id])

    replace_attribute(client, "abort_requests", abort_requests)


@contextmanager
def _process_state_kept(device: Device, rollout: Rollout) -> Iterator[None]:
    """Restore the process state that vLLM's constructor changes.

    The constructor seeds every generator, sets LOCAL_WORLD_SIZE and replaces torch.set_num_threads. It
    selects its GPU by LOCAL_RANK, which is the wrong index if each rank sees only one GPU (srun
    --gpus-per-task). LOCAL_RANK is therefore set to the device's index inside the context. The constructor
    also computes the attention's data parallel rank as if the job consisted only of the ranks of one copy of
    the experts. RANK is therefore set to the rank among these ranks.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    environment = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    set_num_threads = torch.set_num_threads
    if device.is_cuda:
        os.environ["LOCAL_RANK"] = str(device.torch.index)
    if rollout.dp_attention:
        os.environ["RANK"] = str(dist.get_rank() % rollout.ep)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_num_threads = set_num_threads
    os.environ.update(environment)
