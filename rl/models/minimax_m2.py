"""MiniMax-M2: every layer has a mixture of experts; norms are over all queries and all keys of a token.

Attention rotates half of each head's channels. A router scores experts by a sigmoid and chooses by the scores
plus a bias per expert, as in DeepSeek-V3, but without groups of experts. There are no shared experts. The
published files are FP8 blocks. Layers for multi-token prediction (`num_mtp_modules`) are neither trained nor
served nor exported.
"""

from rl.models import dense, experts
from rl.models.dense import in_layer
from rl.models.layer_form import LayerForm
from rl.models.layout import COLUMN, REPLICATED, Weight, kv_heads
from rl.models.sizes import head_dim, num_experts, num_kv_heads

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
BLOCK = "block_sparse_moe"
FIXED = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "qk_norm_type": "per_layer",
    "use_qk_norm": True,
}
"""Key of config.json -> its only supported value, which is also the default."""
ABSENT = ("attention_bias", "shared_intermediate_size", "router_jitter_noise")
"""Keys that may only be absent, 0 or false."""


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    # qk_layernorm is not set. With it, Megatron would sum the gradients of these norms over the ranks.
    return dense.megatron_config(hf) | experts.sigmoid_fields(hf, first_dense=0)


def form(hf: dict) -> LayerForm:
    """Return what sets the layers apart from Megatron's."""
    return LayerForm(norms_all_heads=True)


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "MiniMax-M2", partial=True)
    for key, value in FIXED.items():
        if hf.get(key, value) != value:
            raise ValueError(f"MiniMax-M2 with {key} {hf[key]} is not supported; only {value} is.")
    for key in ABSENT:
        if hf.get(key):
            raise ValueError(f"MiniMax-M2 with {key} {hf[key]} is not supported; use a model without it.")
    if set(hf.get("attn_type_list") or [1]) != {1}:
        raise ValueError(
            f"MiniMax-M2 with attn_type_list {hf['attn_type_list']} is not supported: only type 1, "
            "softmax attention, is."
        )


def weights(hf: dict) -> list[Weight]:
    """Return every parameter and the routers' biases, in the order of the forward pass."""
    out, dim = [dense.embedding(hf)], head_dim(hf)
    of_keys = kv_heads(num_kv_heads(hf), dim)
    for layer in range(hf["num_hidden_layers"]):
        *qkv, proj = dense.attention(hf, layer)
        for side, heads, cut in (("q", hf["num_attention_heads"], COLUMN), ("k", num_kv_heads(hf), of_keys)):
            megatron = f"self_attention.{side}_layernorm"
            qkv.append(in_layer(layer, f"self_attn.{side}_norm", megatron, cut, (heads * dim,)))
        norm, *_ = dense.mlp(hf, layer)
        name, shape = f"{BLOCK}.e_score_correction_bias", (num_experts(hf),)
        bias = in_layer(layer, name, "mlp.router.expert_bias", REPLICATED, shape, suffix="", float32=True)
        routed = experts.routed(hf, layer, BLOCK, gate="w1", up="w3", down="w2")
        out += [*qkv, proj, norm, experts.router(hf, layer, BLOCK), bias, *routed]
    return [*out, *dense.head(hf)]
