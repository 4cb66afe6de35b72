"""What the dense decoders share: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

Plain data: importing this imports neither torch nor Megatron, which a dry run on a login node does not have.

An architecture's file says what is particular to it: biases, norms of queries and keys, which configs it refuses.
Shapes: `H` hidden, `F` intermediate, `V` vocabulary, `q` = heads x channels, `kv` = KV heads x channels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rl.models.layout import GATE_UP, REPLICATED, ROW, VOCAB, Cut, Weight, qkv

if TYPE_CHECKING:
    from torch import Tensor

LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def megatron_config(hf: dict) -> dict:
    """Fields of Megatron's TransformerConfig that follow from the Hugging Face config; no biases, no norms of queries."""
    return dict(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=num_kv_heads(hf),
        kv_channels=head_dim(hf),
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=False,
    )


def num_kv_heads(hf: dict) -> int:
    """Heads of keys and values; a config from before grouped-query attention does not name them."""
    return hf.get("num_key_value_heads") or hf["num_attention_heads"]


def head_dim(hf: dict) -> int:
    """Channels of one attention head."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


# Refusals -------------------------------------------------------------------------------------------------------------


def check_decoder(hf: dict, family: str, *, rope_kinds: tuple[str, ...] = ("default",)) -> None:
    """Raise ValueError, which names the family, for an activation or a rotary embedding that is not built."""
    rope = rope_parameters(hf)
    kind = rope["rope_type"]
    if kind not in rope_kinds:
        known = "the default ones are" if rope_kinds == ("default",) else f"{' and '.join(rope_kinds)} are"
        raise ValueError(f"{family} with rotary embeddings of type {kind} is not supported; only {known}.")
    if kind == "llama3" and (absent := [name for name in LLAMA3_ROPE if name not in rope]):
        raise ValueError(
            f"{family} with rotary embeddings of type llama3 lacks {', '.join(absent)} in its rope_scaling."
        )
    if (part := rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ValueError(
            f"{family} with partial_rotary_factor {part} is not supported; only 1.0, all channels of a head, is."
        )
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{family} with hidden_act {hf['hidden_act']} is not supported; only silu is.")


def refuse_biases(hf: dict, family: str, *keys: str) -> None:
    """Raise ValueError if one of the config's `keys` asks for biases."""
    for key in keys:
        if hf.get(key):
            raise ValueError(
                f"{family} with {key} is not supported: Megatron has one switch for the biases of the attention's output "
                "projection and of the MLP; use a model without them."
            )


def refuse_sliding_window(hf: dict, family: str) -> None:
    """Raise ValueError if a config with Qwen's two keys asks for a window; `sliding_window` alone means nothing there."""
    if hf.get("use_sliding_window"):
        raise ValueError(
            f"{family} with use_sliding_window is not supported; set it to false if the context is shorter anyway."
        )


# Rotary embeddings ----------------------------------------------------------------------------------------------------


def rope_parameters(hf: dict) -> dict:
    """Rotary parameters as transformers 5 reads them: `rope_scaling` of older configs wins over `rope_parameters`.

    Always holds `rope_theta` and `rope_type`.
    """
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    return {"rope_theta": hf.get("rope_theta", 10000.0)} | given | {"rope_type": kind}


def rope_theta(hf: dict) -> float:
    """Base of the rotary embedding."""
    return float(rope_parameters(hf)["rope_theta"])


def scaled_frequencies(hf: dict) -> Tensor | None:
    """Inverse frequencies of Llama 3.1's rotary embedding, float32 [channels / 2]; None where nothing is scaled so.

    A frequency f of wavelength w = 2 pi / f (in tokens) that turns more than `high_freq_factor` times within the original
    context C stays; one that turns less than `low_freq_factor` times becomes f / factor; in between the two are mixed in
    proportion to C / w (meta-llama/llama-models, `apply_scaling`; transformers' `rope_type: llama3`). Megatron 0.16.1 has
    this with C and both factors built in.
    """
    import torch  # only training calls this

    rope = rope_parameters(hf)
    if rope["rope_type"] != "llama3":
        return None
    factor, low, high, context = (float(rope[name]) for name in LLAMA3_ROPE)
    dim = head_dim(hf)
    frequencies = 1.0 / rope_theta(hf) ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    turns = context * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor)


# Weights --------------------------------------------------------------------------------------------------------------


def weights(hf: dict, *, qkv_bias: bool = False, qk_norm: bool = False) -> list[Weight]:
    """Every parameter, in the order of the forward pass.

    qkv_bias: on query, key and value. qk_norm: an RMSNorm over the channels of each query and each key, before the rotary
    embedding.
    """
    layers = [
        weight
        for layer in range(hf["num_hidden_layers"])
        for weight in attention(hf, layer, qkv_bias=qkv_bias, qk_norm=qk_norm) + mlp(hf, layer)
    ]
    return [embedding(hf), *layers, *head(hf)]


def embedding(hf: dict) -> Weight:
    """The token embedding [V, H]."""
    return Weight(
        ("model.embed_tokens.weight",),
        ((hf["vocab_size"], hf["hidden_size"]),),
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        VOCAB,
        first_stage=True,
        tied_to_head=hf.get("tie_word_embeddings", False),
    )


def head(hf: dict) -> list[Weight]:
    """The final norm [H], and the head [V, H] unless the embedding is the head."""
    hidden = hf["hidden_size"]
    out = [
        Weight(
            ("model.norm.weight",),
            ((hidden,),),
            "decoder.final_layernorm.weight",
            "model.norm.weight",
            REPLICATED,
        )
    ]
    if not hf.get("tie_word_embeddings", False):
        out.append(
            Weight(
                ("lm_head.weight",),
                ((hf["vocab_size"], hidden),),
                "output_layer.weight",
                "lm_head.weight",
                VOCAB,
            )
        )
    return out


def attention(hf: dict, layer: int, *, qkv_bias: bool = False, qk_norm: bool = False) -> list[Weight]:
    """The norm before the attention and the attention's weights: query [q, H], key and value [kv, H], output [H, q]."""
    hidden, dim = hf["hidden_size"], head_dim(hf)
    heads, kv_heads = hf["num_attention_heads"], num_kv_heads(hf)
    q, kv = heads * dim, kv_heads * dim
    projections, cut = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv(heads, kv_heads, dim)
    out = [
        in_layer(
            layer,
            ("input_layernorm.weight",),
            ((hidden,),),
            "input_layernorm.weight",
            "input_layernorm.weight",
            REPLICATED,
        ),
        in_layer(
            layer,
            tuple(f"{p}.weight" for p in projections),
            ((q, hidden), (kv, hidden), (kv, hidden)),
            "self_attention.linear_qkv.weight",
            "self_attn.qkv_proj.weight",
            cut,
        ),
    ]
    if qkv_bias:
        names = tuple(f"{p}.bias" for p in projections)
        out.append(
            in_layer(
                layer,
                names,
                ((q,), (kv,), (kv,)),
                "self_attention.linear_qkv.bias",
                "self_attn.qkv_proj.bias",
                cut,
            )
        )
    if qk_norm:
        for side in "qk":
            name = f"self_attn.{side}_norm.weight"
            out.append(
                in_layer(
                    layer, (name,), ((dim,),), f"self_attention.{side}_layernorm.weight", name, REPLICATED
                )
            )
    out.append(
        in_layer(
            layer,
            ("self_attn.o_proj.weight",),
            ((hidden, q),),
            "self_attention.linear_proj.weight",
            "self_attn.o_proj.weight",
            ROW,
        )
    )
    return out


def mlp(hf: dict, layer: int) -> list[Weight]:
    """The norm before the MLP and the MLP's weights: gate and up [F, H], down [H, F]."""
    hidden, ffn = hf["hidden_size"], hf["intermediate_size"]
    return [
        in_layer(
            layer,
            ("post_attention_layernorm.weight",),
            ((hidden,),),
            "pre_mlp_layernorm.weight",
            "post_attention_layernorm.weight",
            REPLICATED,
        ),
        in_layer(
            layer,
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            ((ffn, hidden), (ffn, hidden)),
            "mlp.linear_fc1.weight",
            "mlp.gate_up_proj.weight",
            GATE_UP,
        ),
        in_layer(
            layer,
            ("mlp.down_proj.weight",),
            ((hidden, ffn),),
            "mlp.linear_fc2.weight",
            "mlp.down_proj.weight",
            ROW,
        ),
    ]


def in_layer(
    layer: int,
    hf_names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    megatron: str,
    vllm: str,
    cut: Cut,
) -> Weight:
    """A weight of one layer from its names within the layer."""
    prefix = f"model.layers.{layer}."
    names = tuple(prefix + name for name in hf_names)
    return Weight(names, shapes, "decoder.layers.{layer}." + megatron, prefix + vllm, cut, layer)
