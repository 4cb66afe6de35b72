"""vLLM's CPU layers with the arithmetic of `rl.numerics`, for model.numerics=bitwise.

The trainer calls the same functions (`rl.training.bitwise`). A token's log-prob depends only on the weights
and on the tokens before it, not on chunks of the prompt, prefix caching, preemption or other requests of a
batch.
"""

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MoE
from vllm.model_executor.models.mixtral import MixtralMoE
from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from rl.models import architecture
from rl.models.dense import scaled_frequencies
from rl.numerics import layers
from rl.rollout.cpu_support import PackedLinear


class ExactLinear(PackedLinear):
    """Computes a linear layer from slices of its weight, which the first call after a refit makes."""

    def sliced(self) -> layers.SlicedWeight:
        if self._handler is None:
            weight = self._layer.weight
            channels = weight.shape[1]
            if isinstance(self._layer, RowParallelLinear):
                channels = self._layer.input_size
            self._handler = layers.SlicedWeight.of(weight, channels)
        return self._handler

    def __call__(self, x, weight, bias):
        return layers.linear(x, self.sliced(), bias)


class ExactRow(RowParallelLinear):
    def forward(self, input_):
        assert self.input_is_parallel and self.bias is None
        out = layers.linear(input_, self.cpu_linear.sliced(), group=get_tp_group().cpu_group)
        return (out, None) if self.return_bias else out


class ExactNorm(RMSNorm):
    def forward(self, x, residual=None):
        if residual is not None:
            x = residual = x + residual
        out = layers.rms_norm(x, self.weight.data, self.variance_epsilon)
        return out if residual is None else (out, residual)


class ExactSiluAndMul(SiluAndMul):
    def forward(self, x):
        return layers.gated(x)


class ExactRotary(nn.Module):
    """Replaces a rotary embedding."""

    def __init__(self, original: RotaryEmbeddingBase, hf: dict):
        super().__init__()
        frequencies = scaled_frequencies(hf)
        if frequencies is None:
            base = getattr(original, "scaling_factor", original.base)  # YaRN's argument is its factor
            frequencies = original._compute_inv_freq(base)
        scale = getattr(original, "mscale", 1.0)
        self.table = layers.rotary_table(frequencies, hf["max_position_embeddings"], scale)
        self.width, self.adjacent = original.head_size, not original.is_neox_style

    def forward(self, positions, query, key):
        rotation = self.table[positions.flatten()][:, None]

        def rotate(x):
            return layers.rotate(x.view(len(rotation), -1, self.width), rotation, self.adjacent).view_as(x)

        return rotate(query), rotate(key)


class ExactAttention(CPUAttentionBackendImpl):
    """Attention over the paged cache [blocks, kv_heads, block, 2 * d], whose entries are key, then value."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        at = slot_mapping.long()
        block, within = at // kv_cache.shape[2], at % kv_cache.shape[2]
        kv_cache[block, :, within] = torch.cat([key, value], -1)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *_, **__):
        if attn_metadata is None:  # vLLM measures its memory
            return output
        size = kv_cache.shape[2]

        def gather(slots):
            return kv_cache[slots // size, :, slots % size].chunk(2, -1)

        lengths = attn_metadata.query_start_loc.long().diff()
        count = int(lengths.sum())
        output[:count] = layers.packed_attention(
            query[:count],
            lengths,
            _slots(attn_metadata.block_table, size),
            attn_metadata.seq_lens.long(),
            gather,
            self.scale,
        ).view_as(output[:count])
        return output


def _slots(block_table: Tensor, size: int) -> Tensor:
    """Return the places in the cache of each sequence's keys, int64 [B, S]. block_table: [B, blocks]."""
    return (block_table.long()[:, :, None] * size + torch.arange(size)).flatten(1)


class ExactMLA(MLAAttention):
    """Latent attention over keys and values that are projected up from the latents in every step."""

    def forward(self, q, kv_c_normed, k_pe, output_shape=None, q_dcp_replicated=None):
        metadata, _, cache, slot_mapping = get_attention_context(self.layer_name)
        output = q.new_zeros(output_shape)
        if metadata is None:
            return output
        self.impl.do_kv_cache_update(
            kv_c_normed, k_pe, cache, slot_mapping, self.kv_cache_dtype, self._k_scale
        )
        tables, key_lengths = [], []
        if metadata.decode is not None:
            tables += list(metadata.decode.block_table)
            key_lengths.append(metadata.decode.seq_lens.long())
        lengths = metadata.query_start_loc.long().diff()
        if metadata.prefill is not None:
            assert metadata.prefill.chunked_context is None, "vLLM's CPU build computes whole prompts"
            tables += list(metadata.prefill.block_table)
            key_lengths.append(metadata.prefill.query_start_loc.long().diff())
        weight = layers.SlicedWeight.of(self.kv_b_proj.weight, self.kv_lora_rank)
        size = cache.shape[1]

        def gather(slots):
            latent, rotary = cache[slots // size, slots % size].split(
                [self.kv_lora_rank, self.qk_rope_head_dim], -1
            )
            both = layers.linear(latent, weight).unflatten(-1, (self.num_heads, -1))
            key, value = both.split([self.qk_nope_head_dim, self.v_head_dim], -1)
            shared = rotary[:, :, None].expand(*key.shape[:3], -1)
            return torch.cat([key, shared], -1), value

        count = int(lengths.sum())
        output[:count] = layers.packed_attention(
            q[:count], lengths, _slots(torch.stack(tables), size), torch.cat(key_lengths), gather, self.scale
        ).flatten(1)
        return output


class _ExactMoE:
    """Forward pass of a block of experts, in place of vLLM's runner."""

    routing: layers.Routing

    def forward(self, hidden_states, already_sequence_parallel=False):
        bias = getattr(self.gate, "e_score_correction_bias", None)
        logits = layers.linear(hidden_states, self.gate.weight, dtype=torch.float32)
        weights, ids = layers.route(logits, self.routing, bias)
        routed = self.experts.routed_experts
        group = get_tp_group().cpu_group
        out = layers.experts(hidden_states, weights, ids, routed.w13_weight, routed.w2_weight, group)
        shared = getattr(self, "shared_experts", None)
        return out if shared is None else out + shared(hidden_states)


class ExactDeepseekMoE(_ExactMoE, DeepseekV2MoE):
    pass


class ExactMixtralMoE(_ExactMoE, MixtralMoE):
    pass


class ExactQwen3MoE(_ExactMoE, Qwen3MoeSparseMoeBlock):
    pass


CLASSES = {
    RowParallelLinear: ExactRow,
    RMSNorm: ExactNorm,
    SiluAndMul: ExactSiluAndMul,
    MLAAttention: ExactMLA,
    DeepseekV2MoE: ExactDeepseekMoE,
    MixtralMoE: ExactMixtralMoE,
    Qwen3MoeSparseMoeBlock: ExactQwen3MoE,
}


def make_bitwise(model: nn.Module, hf: dict, sampler) -> None:
    """Give the modules of vLLM's model the classes above, and the sampler the same softmax."""
    for module in list(model.modules()):
        if "cpu_linear" in module.__dict__:
            module.cpu_linear = ExactLinear(module)
        module.__class__ = CLASSES.get(type(module), type(module))
        if isinstance(module, _ExactMoE):
            module.routing = layers.Routing.of(architecture(hf).megatron_config(hf))
        impl = getattr(module, "impl", None)
        if type(impl) is CPUAttentionBackendImpl:
            impl.__class__ = ExactAttention
        for name, child in list(module.named_children()):
            if isinstance(child, RotaryEmbeddingBase):
                setattr(module, name, ExactRotary(child, hf))
    sampler.log_softmax = layers.log_softmax
