"""A stand-in for Transformer Engine, with which a rehearsal builds, trains and refits its layers on a CPU.

It found that megatron-core 0.19.2 describes its MLP layers by partial calls, which ended every run with these
layers (commit 072cfb58). The package has exactly the names in NAMES, so that an import of another name fails
as it would on CUDA. Constructors take the arguments of version 2.11.0. LAYERS and FUNCTIONS compute in torch,
for one rank; other classes cannot be used.
"""

import contextlib
import importlib.machinery
import sys
import types

import torch
import torch.nn.functional as F

VERSION = "2.11.0"
NAMES = {
    "common.recipe": (
        "CustomRecipe DelayedScaling Float8BlockScaling Float8CurrentScaling Format "
        "MXFP8BlockScaling NVFP4BlockScaling"
    ),
    "pytorch": (
        "DotProductAttention Fp8Padding Fp8Unpadding GroupedLinear LayerNorm LayerNormLinear Linear "
        "RMSNorm autocast cpu_offload_v1 fp8_autocast fp8_model_init quantized_model_init"
    ),
    "pytorch.attention.rope": "apply_fused_qkv_rotary_pos_emb apply_rotary_pos_emb",
    "pytorch.constants": "MXFP8_BLOCK_SCALING_SIZE NVFP4_BLOCK_SCALING_SIZE TE_DType",
    "pytorch.cpp_extensions": "cast_to_fp8 general_gemm rmsnorm_fwd",
    "pytorch.cpu_offload": "get_cpu_offload_context",
    "pytorch.cross_entropy": "parallel_cross_entropy",
    "pytorch.distributed": (
        "CudaRNGStatesTracker _NVFP4AllGatherAsyncHandle activation_recompute_forward checkpoint "
        "gather_along_first_dim get_all_rng_states in_fp8_activation_recompute_phase "
        "is_fp8_activation_recompute_enabled reduce_scatter_along_first_dim"
    ),
    "pytorch.float8_tensor": "Float8Tensor",
    "pytorch.fp8": "FP8GlobalStateManager fp8_autocast fp8_model_init",
    "pytorch.graph": (
        "make_graphed_callables restore_fp8_tensors save_fp8_tensors set_capture_end set_capture_start"
    ),
    "pytorch.module.base": "TransformerEngineBaseModule get_dummy_wgrad",
    "pytorch.module.layernorm_linear": "general_gemm",
    "pytorch.module.linear": "general_gemm",
    "pytorch.ops": (
        "AllReduce BasicLinear Bias FusibleOperation GEGLU GELU LayerNorm MakeExtraOutput RMSNorm "
        "ReGLU ReLU ReduceScatter Sequential SiLU SwiGLU"
    ),
    "pytorch.optimizers": "FusedAdam FusedSGD multi_tensor_applier multi_tensor_l2norm multi_tensor_scale",
    "pytorch.permutation": (
        "moe_permute moe_permute_with_probs moe_sort_chunks_by_index "
        "moe_sort_chunks_by_index_with_probs moe_unpermute"
    ),
    "pytorch.quantized_tensor": "QuantizedTensor",
    "pytorch.router": (
        "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss fused_topk_with_score_function"
    ),
    "pytorch.tensor": "MXFP8TensorStorage NVFP4TensorStorage QuantizedTensor",
    "pytorch.tensor.float8_tensor": "Float8Tensor",
    "pytorch.tensor.mxfp8_tensor": "MXFP8Quantizer MXFP8Tensor",
    "pytorch.tensor.nvfp4_tensor": "NVFP4Tensor",
    "pytorch.tensor.utils": "cast_master_weights_to_fp8 post_all_gather_processing replace_raw_data",
    "pytorch.utils": "make_weak_ref nvtx_range_pop nvtx_range_push round_up_to_nearest_multiple",
}
"""Module of Transformer Engine -> its names that megatron-core 0.16.1 and 0.19.2 import."""


class _Product(torch.autograd.Function):
    """x @ weight.T of a layer. The weight's gradient may be added to `main_grad` at once.

    Autograd then gets NaN as that gradient, as Transformer Engine's is not initialised.
    """

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.parameter = layer, weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        (x, weight), of_weight = ctx.saved_tensors, None
        if ctx.needs_input_grad[1]:
            of_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
            if ctx.layer.fuse_wgrad_accumulation:
                ctx.parameter.main_grad.add_(of_weight)
                ctx.parameter.grad_added_to_main_grad = True
                of_weight = torch.full_like(of_weight, torch.nan)
        return grad @ weight, of_weight, None


class _Layer(torch.nn.Module):
    """A layer that checks its arguments against Transformer Engine's arguments."""

    arguments = ""
    takes_more = False
    fuse_wgrad_accumulation = False

    def product(self, x: torch.Tensor, weight: torch.nn.Parameter) -> torch.Tensor:
        return _Product.apply(x, weight, self)

    def __init__(self, *args, **options):
        super().__init__()
        names = self.arguments.split()
        bound = dict(zip(names, args)) | options
        unknown = set() if self.takes_more else bound.keys() - set(names)
        assert not unknown, f"{type(self).__name__} of Transformer Engine has no argument {unknown}"
        assert bound.get("tp_size", 1) == 1, "the stand-in computes on one rank"
        self.build(types.SimpleNamespace(**dict.fromkeys(names) | bound))

    def build(self, given) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no stand-in: add it to {__file__}")

    def parameter(self, *shape: int, dtype, parallel: bool = False) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
        if parallel:  # TE marks the weights of every linear layer, also of one that is not split
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
        return parameter


class Linear(_Layer):
    arguments = (
        "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
        "get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype "
        "parallel_mode parameters_split device ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad "
        "ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type "
        "save_original_input name"
    )

    def build(self, given) -> None:
        shape = given.out_features, given.in_features
        self.weight = self.parameter(*shape, dtype=given.params_dtype, parallel=True)
        self.bias = self.parameter(shape[0], dtype=given.params_dtype) if given.bias else None
        self.return_bias = given.return_bias

    def forward(self, inp, is_first_microbatch=None):
        out = self.product(inp, self.weight)
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class LayerNormLinear(Linear):
    arguments = (
        "in_features out_features eps sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
        "get_rng_state_tracker init_method bias normalization return_bias params_dtype "
        "parallel_mode return_layernorm_output return_layernorm_output_gathered parameters_split "
        "zero_centered_gamma device ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_wgrad "
        "ub_bulk_dgrad ub_name delay_wgrad_compute symmetric_ar_type name"
    )

    def build(self, given) -> None:
        super().build(given)
        assert given.normalization == "RMSNorm" and not given.return_layernorm_output
        self.layer_norm_weight = self.parameter(given.in_features, dtype=given.params_dtype)
        self.eps, self.offset = given.eps, float(given.zero_centered_gamma)

    def forward(self, inp, is_first_microbatch=None):
        weight = self.layer_norm_weight + self.offset
        return super().forward(F.rms_norm(inp, inp.shape[-1:], weight, self.eps))


class RMSNorm(_Layer):
    arguments = "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size"
    takes_more = True

    def build(self, given) -> None:
        size = given.normalized_shape or given.hidden_size
        self.weight = self.parameter(size, dtype=given.params_dtype or given.dtype or torch.bfloat16)
        self.weight.sequence_parallel = given.sequence_parallel
        self.eps, self.offset = given.eps, float(given.zero_centered_gamma)

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight + self.offset, self.eps)


class GroupedLinear(_Layer):
    arguments = (
        "num_gemms in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group "
        "tp_size get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype "
        "parallel_mode device ub_overlap_rs ub_overlap_ag ub_name delay_wgrad_compute "
        "save_original_input name"
    )

    def build(self, given) -> None:
        self.num_gemms, self.return_bias = given.num_gemms, given.return_bias
        for number in range(given.num_gemms):
            weight = self.parameter(
                given.out_features, given.in_features, dtype=given.params_dtype, parallel=True
            )
            setattr(self, f"weight{number}", weight)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        parts = inp.split(m_splits)
        out = torch.cat([self.product(part, getattr(self, f"weight{n}")) for n, part in enumerate(parts)])
        return (out, None) if self.return_bias else out


class DotProductAttention(_Layer):
    arguments = (
        "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format "
        "attn_mask_type window_size sequence_parallel tp_size get_rng_state_tracker tp_group "
        "layer_number attention_type cp_group cp_global_ranks cp_stream cp_comm_type "
        "softmax_scale softmax_type return_max_logit"
    )

    def build(self, given) -> None:
        self.scale = given.softmax_scale

    def forward(self, query, key, value, attention_mask=None, **options):
        from tests.rehearsal.cuda_stand_in import varlen_attn

        assert options["qkv_format"] == "thd" and options["attn_mask_type"].startswith("padding_causal")
        width = value.shape[-1]
        value = F.pad(value, (0, query.shape[-1] - width))
        out = varlen_attn(
            query,
            key,
            value,
            options["cu_seqlens_q"],
            options["cu_seqlens_kv"],
            options["max_seqlen_q"],
            options["max_seqlen_kv"],
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[..., :width].flatten(1)


LAYERS = {
    layer.__name__: layer for layer in (Linear, LayerNormLinear, RMSNorm, GroupedLinear, DotProductAttention)
}


def multi_tensor_applier(operation, flag, lists, *args):
    return operation(0, flag, lists, *args)


def multi_tensor_scale(chunk, flag, lists, scale):
    for source, target in zip(*lists):
        target.copy_(source * scale)


def multi_tensor_l2norm(chunk, flag, lists, per_tensor):
    assert not per_tensor
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm(), None


def get_cpu_offload_context(enabled, *sizes, **options):
    assert not enabled
    return contextlib.nullcontext(), lambda tensor: tensor


def apply_rotary_pos_emb(
    t, freqs, tensor_format, *, fused, cu_seqlens, cp_size=1, cp_rank=0, interleaved=False
):
    """Rotate the first r channels of t [T, heads, d] by the angles freqs [T, 1, 1, r] of a row."""
    assert not interleaved
    assert tensor_format == "thd" and fused and cu_seqlens.tolist() == [0, len(t)] and cp_size == 1
    angles = freqs[: len(t), 0]
    rotated, rest = t.split([angles.shape[-1], t.shape[-1] - angles.shape[-1]], -1)
    halves = rotated.float().chunk(2, -1)
    turned = torch.cat([-halves[1], halves[0]], -1)
    return torch.cat([(rotated.float() * angles.cos() + turned * angles.sin()).to(t.dtype), rest], -1)


def moe_permute(inp, routing_map, num_out_tokens=-1):
    permuted, _, row_id_map, *_ = _megatrons().permute(inp, routing_map, num_out_tokens=num_out_tokens)
    return permuted, row_id_map


def moe_permute_with_probs(inp, probs, routing_map, num_out_tokens=-1):
    return _megatrons().permute(inp, routing_map, probs=probs, num_out_tokens=num_out_tokens)[:3]


def moe_unpermute(inp, row_id_map, merging_probs=None, restore_shape=None):
    assert merging_probs is None
    return _megatrons().unpermute(inp, row_id_map, restore_shape)


def moe_sort_chunks_by_index(inp, split_sizes, sorted_index):
    return _megatrons().sort_chunks_by_idxs(inp, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(inp, probs, split_sizes, sorted_index):
    return _megatrons().sort_chunks_by_idxs(inp, split_sizes, sorted_index, probs=probs)


def fused_topk_with_score_function(*, logits, topk, **options):
    return _megatrons().topk_routing_with_score_function(logits, topk, **options)


def _megatrons():
    """Return Megatron's functions that these kernels replace."""
    from megatron.core.transformer.moe import moe_utils

    return moe_utils


FUNCTIONS = {
    function.__name__: function
    for function in (
        moe_permute,
        moe_permute_with_probs,
        moe_unpermute,
        moe_sort_chunks_by_index,
        moe_sort_chunks_by_index_with_probs,
        fused_topk_with_score_function,
        multi_tensor_applier,
        multi_tensor_scale,
        multi_tensor_l2norm,
        get_cpu_offload_context,
        apply_rotary_pos_emb,
    )
}


def install() -> None:
    """Make `import transformer_engine` import the stand-in. Call this before the first import of Megatron."""
    _module("transformer_engine")  # otherwise cpu_support sets the name to None
    from rl.training.cpu_support import Adam

    replaced = {**LAYERS, **FUNCTIONS, "FusedAdam": Adam}
    for module, names in NAMES.items():
        owner = _module(f"transformer_engine.{module}")
        for name in names.split():
            if name in replaced and module != "pytorch.ops":
                value: object = replaced[name]
            else:  # None: functions for FP8, graphs and fusions that the program does not use
                value = type(name, (_Layer,), {"takes_more": True}) if name[0].isupper() else None
            setattr(owner, name, value)


def _module(name: str) -> types.ModuleType:
    """Return the module of a dotted name; create it and its parents if necessary."""
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__, module.__version__ = [], VERSION
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_module(parent), last, module)
    return sys.modules[name]
