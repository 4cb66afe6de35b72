"""Patches that make vLLM's CPU build usable inside a trainer. Nothing is patched on CUDA."""

import ctypes
import functools
import glob
import mmap
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from rl.runtime.replacement import replace_attribute

if TYPE_CHECKING:
    from vllm._custom_ops import CPUDNNLGEMMHandler


def once_on_cpu(patch: Callable[[], None]) -> Callable[[], None]:
    """Return a function that applies a patch at its first call, unless vLLM runs on CUDA."""

    @functools.cache
    @functools.wraps(patch)
    def install() -> None:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            patch()

    return install


@once_on_cpu
def install() -> None:
    """Apply the patches that every engine needs, before it is built."""
    from rl.rollout import cpu_async

    cpu_async.install()
    _keep_weights_alive()
    _keep_experts_alive()
    _choose_from_one_group()
    _rotate_heads()
    _shared_memory_names_of_this_job()


def _keep_weights_alive() -> None:
    """Make linear layers keep their parameters and compute with a packed copy that can be rebuilt.

    The CPU build packs each linear layer's weight into a oneDNN handle once and replaces `layer.weight` by an
    empty tensor. For embeddings and tied heads it computes with a packed copy that an update never reaches:
    the logits are silently wrong.
    """
    import vllm.model_executor.layers.utils as layers

    def pack(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = PackedLinear(layer)

    replace_attribute(layers, "dispatch_cpu_unquantized_gemm", pack)


class PackedLinear:
    """Computes a linear layer from a packed copy of its weight, which the first call makes.

    oneDNN's product with packed weights takes 0.5 to 0.9 times as long as torch's product, which packs the
    weight at every call. torch's product is used where oneDNN has none: for bfloat16 on processors without
    AVX-512.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._handler: CPUDNNLGEMMHandler | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from vllm import _custom_ops as ops

        if not _can_pack(weight.dtype):
            return functional.linear(x, weight, bias)
        if self._handler is None:
            self._handler = ops.create_onednn_mm(self._layer.weight.t(), 32)
        return ops.onednn_mm(self._handler, x, bias)

    def release(self) -> None:
        """Free the packed copy. Must be called after every write to the weight; also saves memory."""
        self._handler = None


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has a product with packed weights of the dtype on this processor."""
    from vllm import _custom_ops as ops

    try:
        ops.create_onednn_mm(torch.zeros(32, 32, dtype=dtype).t(), 1)
    except RuntimeError:
        return False
    return True


def release_packed_weights(model: torch.nn.Module) -> None:
    """Free the packed copies of all linear layers of the model."""
    for module in model.modules():
        packed = module.__dict__.get("cpu_linear")
        if isinstance(packed, PackedLinear):
            packed.release()


def _keep_experts_alive() -> None:
    """Make mixtures of experts compute with their parameters, so that updates of the weights reach them.

    The CPU build packs w13_weight and w2_weight once and computes with the packed copy. Its kernel requires
    multiples of 32 channels, also of the hidden states, which small models do not have.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    replace_attribute(Experts, "process_weights_after_loading", lambda self, layer: None)
    replace_attribute(Experts, "apply", live_experts)
    replace_attribute(Experts, "_supports_grouped_gemm", classmethod(lambda *_: (True, None)))


def _choose_from_one_group() -> None:
    """Make a router without groups choose from one group of all experts.

    Without groups the CPU build has no sigmoid, and ignores the bias of ERNIE 4.5's router.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    build = CPURouter.__init__

    def build_with_group(self: CPURouter, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        has_own_choice = self.scoring_func == "sqrtsoftplus" or self.custom_routing_function is not None
        is_biased = self.e_score_correction_bias is not None and not has_own_choice
        if (self.scoring_func == "sigmoid" or is_biased) and not self.use_grouped_topk:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    replace_attribute(CPURouter, "__init__", build_with_group)


def _rotate_heads() -> None:
    """Give vLLM's rotary kernel heads side by side; of queries [T, heads, d] it rotates other rows (LFM2)."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu

    def rotate_flat(
        self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        count = positions.numel()
        flat = None if key is None else key.reshape(count, -1)
        queries, keys = rotate(self, positions.flatten(), query.reshape(count, -1), flat)
        return queries.view_as(query), None if keys is None or key is None else keys.view_as(key)

    replace_attribute(RotaryEmbedding, "forward_cpu", rotate_flat)


def _gated(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return activation(gate) * up


def _swiglu_of_gpt_oss(x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": partial(_gated, functional.silu),
    "gelu": partial(_gated, functional.gelu),
    "gelu_tanh": partial(_gated, partial(functional.gelu, approximate="tanh")),
    "swigluoai": _swiglu_of_gpt_oss,
}
"""vLLM's name of an activation -> function of gate and up [T, 2F]."""


def live_experts(
    self: Any,
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Any,
    w2: Any,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> None:
    """Sum the outputs of each token's experts; replaces CPUUnquantizedExperts.apply.

    output, hidden_states: [T, H]. w1: [E, 2F/tp, H], the rows of gate, then of up. w2: [E, H, F/tp].
    topk_weights, topk_ids: [T, k]. expert_map: with expert parallelism the index in w1 and w2 of each expert
    of the layer, -1 for experts of other ranks; vLLM adds the ranks' outputs.
    """
    activate, biases = _ACTIVATIONS[activation.value], (self.w1_bias, self.w2_bias)
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    own = topk_ids if expert_map is None else expert_map[topk_ids.long()]
    for expert in own[own >= 0].unique().tolist():
        token, choice = (own == expert).nonzero(as_tuple=True)
        first, second = (None if bias is None else bias[expert] for bias in biases)
        rows, factor = hidden_states[token], topk_weights[token, choice, None].float()
        if apply_router_weight_on_input:  # Llama 4
            rows, factor = (rows * factor).to(rows.dtype), torch.ones_like(factor)
        inner = activate(functional.linear(rows, w1[expert], first))
        out = functional.linear(inner, w2[expert], second)
        total.index_add_(0, token, out * factor)
    output.copy_(total)


@once_on_cpu
def add_fp8_layers() -> None:
    """Make linear layers and experts in FP8 compute with dequantised weights.

    The CPU build has kernels for them only on processors with AMX. Activations are not quantised here.
    """
    from rl.rollout import cpu_fp8

    cpu_fp8.install()


@once_on_cpu
def add_collectives_of_experts() -> None:
    """Add vLLM's collectives for exchanging tokens between replicas that share experts.

    vLLM's CPU communicator lacks them. The arguments are the same as in its CUDA communicator.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: CpuCommunicator, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        """Return the inputs [sizes[i], ...] of all ranks, concatenated; of a list of inputs, a list."""
        assert dim == 0
        if isinstance(input_, list):
            return [self.all_gatherv(each, dim, sizes) for each in input_]
        sizes = sizes or [len(input_)] * self.world_size
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        gathered = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes)])

    def reduce_scatterv(
        self: CpuCommunicator, input_: Tensor, dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor:
        """Return this rank's part of the sum of the inputs [sum(sizes), ...] over the ranks."""
        assert dim == 0
        total = input_.clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        sizes = sizes or [len(total) // self.world_size] * self.world_size
        return total.split(sizes)[self.rank_in_group].contiguous()

    replace_attribute(CpuCommunicator, "all_gatherv", all_gatherv)
    replace_attribute(CpuCommunicator, "reduce_scatterv", reduce_scatterv)


@once_on_cpu
def clear_attention_of_dummy_steps() -> None:
    """Make the attention of a step without requests 0, as vLLM's other backends do.

    The CPU build returns uninitialised memory. Replicas that share experts compute the token of such a step
    together with other replicas' tokens, and an expert's number of tokens changes the rounding of each token.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

    attend = CPUAttentionBackendImpl.forward

    def forward(
        self: CPUAttentionBackendImpl,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        if attn_metadata is None:
            return output.zero_()
        return attend(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **options)

    replace_attribute(CPUAttentionBackendImpl, "forward", forward)


@once_on_cpu
def multiply_adapters_by_group() -> None:
    """Make vLLM's CPU build add adapters with one product per adapter and layer.

    It copies A and B of its adapter for every token, which takes several times as long as the model itself.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    update_metadata = PunicaWrapperCPU.update_metadata

    def update_and_group(self: Any, *args: Any, **options: Any) -> None:
        update_metadata(self, *args, **options)
        slots = self.token_lora_indices
        self.adapter_groups = [
            (slot, (slots == slot).nonzero().squeeze(1)) for slot in slots.unique().tolist() if slot >= 0
        ]

    def add_lora_linear(
        self: Any,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Sequence[Tensor],
        lora_b_stacked: Sequence[Tensor],
        scale: float,
        output_slices: Sequence[int],
        **_: Any,
    ) -> None:
        """Add scale * B A x to y for each part of the output. y: [T, out]. x: [T, in]. A, B: [N, 1, ...]."""
        for slot, rows in self.adapter_groups:
            is_whole = len(rows) == len(y)  # all tokens use one adapter
            inputs, first = x if is_whole else x[rows], 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices):
                out = y[:, first : first + width]
                hidden = functional.linear(inputs, a[slot, 0])
                if is_whole:
                    out.addmm_(hidden, b[slot, 0].t(), alpha=scale)
                else:
                    out.index_add_(0, rows, functional.linear(hidden, b[slot, 0]), alpha=scale)
                first += width

    replace_attribute(PunicaWrapperCPU, "update_metadata", update_and_group)
    replace_attribute(PunicaWrapperCPU, "add_lora_linear", add_lora_linear)


def _shared_memory_names_of_this_job() -> None:
    """Add host, Slurm job and port to the tensor parallel communicator's names in /dev/shm.

    vLLM's names are constant per host, so two jobs on one host would write into each other's memory. If an
    earlier job on this port was killed, its segments still exist. Each rank therefore first removes the
    segment with its name; otherwise the creation of the new segment would fail with errno 17.
    """
    import vllm.distributed.device_communicators.cpu_communicator as communicator

    shared = communicator._CPUSHMDistributed
    original = shared.make_group_name

    def make_group_name(of: communicator.CpuCommunicator) -> str:
        job = (os.environ.get(key, "") for key in ("SLURM_JOB_ID", "MASTER_PORT"))
        tag = "-".join((socket.gethostname(), *job))
        name = f"{tag}-{original(of)}".replace("/", "")
        _shared_memory_names.append(name)
        Path("/dev/shm", f"{name}_{of.rank}").unlink(missing_ok=True)  # before this rank creates it
        return name

    replace_attribute(shared, "make_group_name", staticmethod(make_group_name))


_shared_memory_names: list[str] = []


def unlink_shared_memory() -> None:
    """Unlink the segments in /dev/shm. Call it after a barrier, when every rank has opened them.

    The kernel then frees the memory when the last process exits, also after a crash.
    """
    for name in _shared_memory_names:
        for path in Path("/dev/shm").glob(f"{glob.escape(name)}*"):
            path.unlink(missing_ok=True)
    _shared_memory_names.clear()


class KvCache:
    """The KV cache of the CPU engine; its memory can be released and restored.

    The views of all layers share storages. Releasing and restoring changes only the size of the storages, so
    the views remain valid.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self.storages = [(storage, storage.nbytes()) for storage in storages.values()]

    def release(self) -> None:
        """Free the memory."""
        for storage, _ in self.storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again, zeroed."""
        for storage, num_bytes in self.storages:
            if storage.nbytes() == 0:
                storage.resize_(num_bytes)
                _zero(storage.data_ptr(), num_bytes)


def _zero(address: int, num_bytes: int) -> None:
    """Fill memory with zeros, without writing to whole pages.

    After madvise(2) with MADV_DONTNEED, the kernel provides zeroed pages at their first use. A large cache
    therefore takes only the memory of the part that is used.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    pages = ctypes.c_size_t(max(0, end - first))
    if not pages.value or ctypes.CDLL(None).madvise(ctypes.c_void_p(first), pages, mmap.MADV_DONTNEED):
        first = end = address + num_bytes  # there is no whole page, or the pages are locked
    ctypes.memset(address, 0, first - address)
    ctypes.memset(end, 0, address + num_bytes - end)
