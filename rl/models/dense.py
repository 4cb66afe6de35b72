"""Parts common to the dense decoders: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

This module imports neither torch nor Megatron, which a login node may lack. The file of an architecture adds
its biases, its query and key norms, and the checks of its config. Shapes: `H` hidden, `F` intermediate, `V`
vocabulary, `q` = heads x channels, `kv` = KV heads x channels.
"""

from __future__ import annotations

from collections.abc import Collection

from rl.models.layout import COLUMN, REPLICATED, ROW, VOCAB, Cut, Weight, qkv
from rl.models.rope import KINDS, PARTIAL, rope_parameters
from rl.models.sizes import ffn_width, head_dim, is_tied, num_kv_heads


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig, without biases and query and key norms."""
    return dict(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=ffn_width(hf),
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=num_kv_heads(hf),
        kv_channels=head_dim(hf),
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=False,
    )


# Refusals ---------------------------------------------------------------------------------------------------


def check_decoder(
    hf: dict, family: str, *, rope_kinds: Collection[str] = tuple(KINDS), partial: bool = False
) -> None:
    """Raise ValueError, naming the family, for an unsupported activation or rotary embedding.

    partial: whether the model may rotate only a part of a head's channels. config.json must then state the
    part, because libraries have different defaults.
    """
    rope = rope_parameters(hf)
    kind = rope["rope_type"]
    if kind not in rope_kinds:
        raise ValueError(
            f"{family} with rotary embeddings of type {kind} is not supported; only "
            f"{', '.join(rope_kinds)} are."
        )
    if absent := [name for name in KINDS[kind] if rope.get(name) is None]:
        raise ValueError(
            f"{family} with rotary embeddings of type {kind} lacks {', '.join(absent)} in its rope_scaling."
        )
    if not (isinstance(factor := rope.get("factor", 1), int | float) and factor >= 1):
        raise ValueError(
            f"{family} with factor {factor!r} in its rope_scaling is not supported; use 1 or more."
        )
    if partial and PARTIAL not in rope:
        raise ValueError(f"{family} requires {PARTIAL} in config.json; the published models have 0.5.")
    if not partial and (part := rope.get(PARTIAL, 1.0)) != 1.0:
        raise ValueError(f"{family} with partial_rotary_factor {part} is not supported; only 1.0 is.")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{family} with hidden_act {hf['hidden_act']} is not supported; only silu is.")


def refuse_biases(hf: dict, family: str, *keys: str) -> None:
    """Raise ValueError if one of the config's `keys` enables biases."""
    for key in keys:
        if hf.get(key):
            raise ValueError(
                f"{family} with {key} is not supported: Megatron has one switch for the biases of the "
                "attention's output projection and of the MLP; use a model without them."
            )


def refuse_sliding_window(hf: dict, family: str) -> None:
    """Raise ValueError if layers have a window. In Qwen, `sliding_window` alone has no effect."""
    kinds = hf.get("layer_types") or []
    if hf.get("use_sliding_window") or "sliding_attention" in kinds:
        raise ValueError(
            f"{family} with use_sliding_window is not supported, nor is sliding_attention in layer_types; "
            "if no sequence exceeds the window, set the first to false and all layers to full_attention."
        )
    if kinds and len(kinds) != hf["num_hidden_layers"]:
        raise ValueError(
            f"{family} has {len(kinds)} layer_types in config.json, but num_hidden_layers="
            f"{hf['num_hidden_layers']}; correct the one that is wrong."
        )


# Weights ----------------------------------------------------------------------------------------------------


def weights(hf: dict, *, qkv_bias: bool = False, qk_norm: bool = False) -> list[Weight]:
    """Return every parameter, in the order of the forward pass.

    qkv_bias: whether query, key and value have biases. qk_norm: whether there is an RMSNorm over the channels
    of each query and each key, before the rotary embedding.
    """
    layers = [
        weight
        for layer in range(hf["num_hidden_layers"])
        for weight in attention(hf, layer, qkv_bias=qkv_bias, qk_norm=qk_norm) + mlp(hf, layer)
    ]
    return [embedding(hf), *layers, *head(hf)]


def embedding(hf: dict) -> Weight:
    """Return the token embedding [V, H]."""
    name, shape = "model.embed_tokens.weight", (hf["vocab_size"], hf["hidden_size"])
    tied = is_tied(hf)
    megatron = "embedding.word_embeddings.weight"
    return Weight((name,), (shape,), megatron, name, VOCAB, first_stage=True, tied_to_head=tied)


def head(hf: dict) -> list[Weight]:
    """Return the final norm [H], and the head [V, H] unless it is tied to the embedding."""
    norm, shape = "model.norm.weight", (hf["hidden_size"],)
    out = [Weight((norm,), (shape,), "decoder.final_layernorm.weight", norm, REPLICATED)]
    if not is_tied(hf):
        name = "lm_head.weight"
        out.append(Weight((name,), ((hf["vocab_size"], *shape),), "output_layer.weight", name, VOCAB))
    return out


def attention(hf: dict, layer: int, *, qkv_bias: bool = False, qk_norm: bool = False) -> list[Weight]:
    """Return the norm before the attention and the attention's weights.

    Shapes: query [q, H], key and value [kv, H], output [H, q].
    """
    hidden, dim = hf["hidden_size"], head_dim(hf)
    heads, kv_heads = hf["num_attention_heads"], num_kv_heads(hf)
    q, kv = heads * dim, kv_heads * dim
    both, fused = "self_attention.linear_qkv", "self_attn.qkv_proj"
    names, cut = "self_attn.q_proj self_attn.k_proj self_attn.v_proj", qkv(heads, kv_heads, dim)
    out = [
        in_layer(layer, "input_layernorm", "input_layernorm", REPLICATED, (hidden,)),
        in_layer(layer, names, both, cut, (q, hidden), (kv, hidden), (kv, hidden), vllm=f"{fused}.weight"),
    ]
    if qkv_bias:
        out.append(
            in_layer(layer, names, both, cut, (q,), (kv,), (kv,), suffix=".bias", vllm=f"{fused}.bias")
        )
    if qk_norm:
        for side in "qk":
            megatron = f"self_attention.{side}_layernorm"
            out.append(in_layer(layer, f"self_attn.{side}_norm", megatron, REPLICATED, (dim,)))
    return [*out, in_layer(layer, "self_attn.o_proj", "self_attention.linear_proj", ROW, (hidden, q))]


def mlp(hf: dict, layer: int) -> list[Weight]:
    """Return the norm before the MLP and the weights of the MLP."""
    hidden = hf["hidden_size"]
    norm = in_layer(layer, "post_attention_layernorm", "pre_mlp_layernorm", REPLICATED, (hidden,))
    return [norm, *swiglu(layer, "mlp", hidden, ffn_width(hf))]


def swiglu(layer: int, block: str, hidden: int, ffn: int) -> list[Weight]:
    """Return gate and up [F, H] and down [H, F] of an MLP that is called `block` on every side."""
    names, fused = f"{block}.gate_proj {block}.up_proj", f"{block}.gate_up_proj.weight"
    return [
        in_layer(layer, names, f"{block}.linear_fc1", COLUMN, (ffn, hidden), (ffn, hidden), vllm=fused),
        in_layer(layer, f"{block}.down_proj", f"{block}.linear_fc2", ROW, (hidden, ffn)),
    ]


def in_layer(
    layer: int,
    names: str,
    megatron: str,
    cut: Cut,
    *shapes: tuple[int, ...],
    suffix: str = ".weight",
    vllm: str = "",
    expert: int | None = None,
    float32: bool = False,
) -> Weight:
    """Return a weight of one layer, given its names within the layer.

    names: the Hugging Face names of `shapes`, separated by spaces. suffix: appended to the Hugging Face names
    and to `megatron`. vllm: the name in vLLM, with its suffix; by default the first Hugging Face name.
    """
    prefix = f"model.layers.{layer}."
    hf = tuple(f"{prefix}{name}{suffix}" for name in names.split())
    ours, theirs = "decoder.layers.{layer}." + megatron + suffix, prefix + vllm if vllm else hf[0]
    return Weight(hf, shapes, ours, theirs, cut, layer, expert=expert, float32=float32)
