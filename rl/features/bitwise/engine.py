"""vLLM's CPU layers with the arithmetic of `rl.features.bitwise`, for model.numerics=bitwise.

The trainer calls the same functions (`rl.features.bitwise.trainer`). A token's log-prob depends only on the
weights and the tokens before it, not on chunks of the prompt, prefix caching, preemption or other requests.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MoE
from vllm.model_executor.models.glm4_moe import Glm4MoE
from vllm.model_executor.models.glm4_moe_lite import Glm4MoeLite
from vllm.model_executor.models.mixtral import MixtralMoE
from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock

from rl.config.adapter import Adapter
from rl.config.schema import Config
from rl.features.bitwise import layers
from rl.models import architecture, rope
from rl.rollout.cpu_support import PackedLinear
from rl.rollout.parts import EnginePart
from rl.runtime.replacement import replace_attribute

if TYPE_CHECKING:
    from rl.rollout.engine import RolloutEngine


class EngineLinear(PackedLinear):
    """Computes a linear layer from slices of its weight, which the first call after a refit makes."""

    _slices: layers.SlicedWeight | None = None

    def sliced(self) -> layers.SlicedWeight:
        """Return the slices. For a row-parallel layer collective over the tensor parallel group."""
        if self._slices is None:
            is_row = isinstance(self._layer, RowParallelLinear)
            self._slices = layers.SlicedWeight.of(
                self._layer.weight, get_tp_group().device_group if is_row else None
            )
        return self._slices

    def release(self) -> None:
        self._slices = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return layers.linear(x, self.sliced(), bias)


class BitwiseLinearMethod(UnquantizedLinearMethod):
    """Computes a linear layer on CUDA."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return layers.linear(x, layer.weight, bias)


class BitwiseEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Computes a head on CUDA."""

    apply = BitwiseLinearMethod.apply


def _weight_of(layer: Any) -> Tensor | layers.SlicedWeight:
    """Return the layer's weight, on CPU in slices that are kept until the next refit."""
    packed = layer.__dict__.get("cpu_linear")
    return layer.weight if packed is None else packed.sliced()


class EngineRow(RowParallelLinear):
    def forward(self, input_: Tensor) -> Tensor | tuple[Tensor, nn.Parameter | None]:
        assert self.input_is_parallel and self.bias is None
        out = layers.linear(input_, _weight_of(self), group=get_tp_group().device_group)
        return (out, None) if self.return_bias else out


class EngineNorm(RMSNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is not None:
            x = residual = x + residual
        out = layers.rms_norm(x, self.weight.data, self.variance_epsilon)
        return out if residual is None else (out, residual)


class BitwiseSiluAndMul(SiluAndMul):
    def forward(self, x: Tensor) -> Tensor:
        return layers.gated(x)


class EngineRotary(nn.Module):
    """Replaces a rotary embedding."""

    def __init__(self, original: RotaryEmbeddingBase, hf: dict):
        super().__init__()
        positions = rope.positions(hf)
        self.table = layers.rotary_table(rope.frequencies(hf), positions, rope.magnitude(hf))
        self.width, self.adjacent = original.head_size, not original.is_neox_style

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        self.table = self.table.to(positions.device)
        rotation = self.table[positions.flatten()][:, None]

        def rotate(x: Tensor) -> Tensor:
            return layers.rotate(x.view(len(rotation), -1, self.width), rotation, self.adjacent).view_as(x)

        return rotate(query), rotate(key)


def store(layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values into the cache [blocks, kv_heads, block, 2 * d]; replaces do_kv_cache_update."""
    at = slot_mapping.long()
    block, within = at // kv_cache.shape[2], at % kv_cache.shape[2]
    kv_cache[block, :, within] = torch.cat([key, value], -1)[: len(at)]


def attend(
    scale: float,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Compute attention over the cache; replaces an attention backend's forward."""
    if attn_metadata is None:  # vLLM measures its memory
        return output
    size = kv_cache.shape[2]

    def gather(slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = kv_cache[slots // size, :, slots % size].chunk(2, -1)
        return keys, values

    lengths = attn_metadata.query_start_loc.long().diff()
    count = int(lengths.sum())
    slots, key_lengths = _slots(attn_metadata.block_table, size), attn_metadata.seq_lens.long()
    found = layers.packed_attention(query[:count], lengths, slots, key_lengths, gather, scale)
    output[:count] = found.view_as(output[:count])
    return output


def _slots(block_table: Tensor, size: int) -> Tensor:
    """Return the places in the cache of each sequence's keys, int64 [B, S]. block_table: [B, blocks]."""
    within = torch.arange(size, device=block_table.device)
    return (block_table.long()[:, :, None] * size + within).flatten(1)


class BitwiseMLA(MLAAttention):
    """Latent attention over keys and values that are projected up from the latents in every step."""

    def forward(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        output_shape: torch.Size | None = None,
        q_dcp_replicated: Tensor | None = None,
    ) -> Tensor:
        metadata, _, cache, slot_mapping = get_attention_context(self.layer_name)
        assert output_shape is not None
        output = q.new_zeros(output_shape)
        if metadata is None:
            return output
        impl: Any = self.impl
        impl.do_kv_cache_update(kv_c_normed, k_pe, cache, slot_mapping, self.kv_cache_dtype, self._k_scale)
        tables, key_lengths = [], []
        if metadata.decode is not None:
            tables += list(metadata.decode.block_table)
            key_lengths.append(metadata.decode.seq_lens.long())
        lengths = metadata.query_start_loc.long().diff()
        if metadata.prefill is not None:
            tables += list(metadata.prefill.block_table)
            key_lengths.append(metadata.prefill.query_start_loc.long().diff())
            if metadata.prefill.chunked_context is not None:  # not on CPU, which computes whole prompts
                key_lengths[-1] = key_lengths[-1] + metadata.prefill.chunked_context.context_lens
        weight = _weight_of(self.kv_b_proj)
        size = cache.shape[1]

        def gather(slots: Tensor) -> tuple[Tensor, Tensor]:
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


class _BitwiseMoE:
    """Forward pass of a block of experts, in place of vLLM's runner."""

    routing: layers.RouterOptions

    def forward(self: Any, hidden_states: Tensor, already_sequence_parallel: bool = False) -> Tensor:
        bias = getattr(self.gate, "e_score_correction_bias", None)
        logits = layers.linear(hidden_states, self.gate.weight, dtype=torch.float32)
        weights, ids = layers.route(logits, self.routing, bias)
        routed = self.experts.routed_experts
        group = get_tp_group().device_group
        out = layers.experts(hidden_states, weights, ids, routed.w13_weight, routed.w2_weight, group)
        shared = getattr(self, "shared_experts", None)
        return out if shared is None else out + shared(hidden_states)


MIXTURES = DeepseekV2MoE, Glm4MoE, Glm4MoeLite, MixtralMoE, Qwen3MoeSparseMoeBlock
CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    RowParallelLinear: EngineRow,
    RMSNorm: EngineNorm,
    SiluAndMul: BitwiseSiluAndMul,
    MLAAttention: BitwiseMLA,
    **{block: type(f"Bitwise{block.__name__}", (_BitwiseMoE, block), {}) for block in MIXTURES},
}
"""vLLM's class -> its replacement."""


METHODS: dict[type, type] = {
    UnquantizedLinearMethod: BitwiseLinearMethod,
    UnquantizedEmbeddingMethod: BitwiseEmbeddingMethod,
}


class BitwiseEngine(EnginePart):
    """Makes an engine compute the log-probs of a trainer with model.numerics=bitwise."""

    def options(self, engine: "RolloutEngine") -> dict:
        if not engine.device.is_cuda:
            return {}
        options: dict = {"enforce_eager": True}  # `layers.packed_attention` reads lengths on the host
        if "kv_lora_rank" not in engine.hf:
            options["attention_backend"] = "TRITON_ATTN"  # `store` and `attend` know its cache
        return options

    def built(self, engine: "RolloutEngine") -> None:
        """Give the modules of the model the classes above, and the sampler the same softmax."""
        for module in list(engine.model.modules()):
            _convert(module, engine.hf)
        if not engine.device.is_cuda:
            replace_attribute(engine.runner.sampler, "log_softmax", layers.log_softmax)
            return
        from vllm.v1.worker.gpu.sample import logprob

        replace_attribute(logprob, "compute_token_logprobs", token_logprobs)


def _convert(module: Any, hf: dict) -> None:
    if "cpu_linear" in module.__dict__:
        module.cpu_linear = EngineLinear(module)
    elif type(method := getattr(module, "quant_method", None)) in METHODS:
        method.__class__ = METHODS[type(method)]
    module.__class__ = CLASSES.get(type(module), type(module))
    if isinstance(module, _BitwiseMoE):
        module.routing = layers.RouterOptions.of(architecture(hf).megatron_config(hf))
    impl = getattr(module, "impl", None)
    if impl is not None and not isinstance(module, MLAAttention):
        replace_attribute(impl, "forward", partial(attend, impl.scale))
        replace_attribute(impl, "do_kv_cache_update", store)
    for name, child in list(module.named_children()):
        if isinstance(child, RotaryEmbeddingBase):
            setattr(module, name, EngineRotary(child, hf))


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Replace the function of vLLM's sampler for CUDA: log-probs of token_ids [B, n], float32."""
    return layers.log_softmax(logits.float()).gather(1, token_ids.long())


def parts(config: Config, adapters: Sequence[Adapter]) -> list[EnginePart]:
    """Return the parts of an engine."""
    return [BitwiseEngine()]
