"""Qwen3-Next: three of four layers have gated delta nets in place of attention, the others a gated attention.

A quarter of a head's channels is rotated, and norms multiply by 1 + weight but for that of the delta nets.
The router and the experts are those of Qwen3-MoE; a shared expert has a gate of its own. Checkpoints hold the
projections of a delta net in two tensors, whose rows are grouped by key head. Their layers for multi-token
prediction (`mtp.*`) are neither trained nor served nor exported.
"""

import functools
import itertools
from dataclasses import replace

from rl.models import dense, experts, qwen3_moe
from rl.models.dense import in_layer
from rl.models.layout import COLUMN, REPLICATED, ROW, Cut, Piece, Weight, joined, kv_heads
from rl.models.sizes import head_dim, layer_kinds, num_kv_heads

ARCHITECTURES = ("Qwen3NextForCausalLM",)
KINDS = {"linear_attention", "full_attention"}


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    fields = qwen3_moe.megatron_config({"norm_topk_prob": True} | hf)
    return fields | dict(
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        linear_attention_freq=[int(kind == "linear_attention") for kind in layer_kinds(hf)],
        linear_conv_kernel_dim=hf["linear_conv_kernel_dim"],
        linear_key_head_dim=hf["linear_key_head_dim"],
        linear_value_head_dim=hf["linear_value_head_dim"],
        linear_num_key_heads=hf["linear_num_key_heads"],
        linear_num_value_heads=hf["linear_num_value_heads"],
        moe_shared_expert_intermediate_size=hf["shared_expert_intermediate_size"],
        moe_shared_expert_gate=True,
    )


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "Qwen3-Next", partial=True)
    dense.refuse_sliding_window(hf, "Qwen3-Next")
    dense.refuse_biases(hf, "Qwen3-Next", "attention_bias")
    if unknown := set(layer_kinds(hf)) - KINDS:
        raise ValueError(f"Qwen3-Next with {sorted(unknown)[0]} in layer_types is not supported.")
    keys, values = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    if values % keys:
        raise ValueError(
            f"Qwen3-Next with linear_num_value_heads {values} is not supported: it must be a multiple of "
            f"linear_num_key_heads {keys}."
        )
    if not any(qwen3_moe.moe_layers(hf)):
        raise ValueError("Qwen3-Next without a layer of experts is not supported.")


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass."""
    out = [dense.embedding(hf)]
    for layer, (kind, is_moe) in enumerate(zip(layer_kinds(hf), qwen3_moe.moe_layers(hf))):
        out += _delta_net(hf, layer) if kind == "linear_attention" else _attention(hf, layer)
        norm, *mlp = dense.mlp(hf, layer)
        out += [norm, *(_mixture(hf, layer) if is_moe else mlp)]
    return [*out, *dense.head(hf)]


def _mixture(hf: dict, layer: int) -> list[Weight]:
    """Return router, routed experts, the shared expert and its gate [1, H]."""
    hidden, width = hf["hidden_size"], hf["shared_expert_intermediate_size"]
    out = [experts.router(hf, layer, "mlp"), *experts.routed(hf, layer, "mlp")]
    for weight in dense.swiglu(layer, "mlp.shared_expert", hidden, width):
        out.append(replace(weight, megatron=weight.megatron.replace("shared_expert.", "shared_experts.")))
    name, megatron = "mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight"
    return [*out, in_layer(layer, name, megatron, REPLICATED, (1, hidden), suffix="")]


def _delta_net(hf: dict, layer: int) -> list[Weight]:
    """Return the norm before the delta net and its weights.

    Rows of a key head's group: in_proj_qkvz query, key, values, gates; in_proj_ba betas, decays. conv1d
    [channels, 1, taps] has the channels of all queries, of all keys, of all values.
    """
    hidden, heads = hf["hidden_size"], hf["linear_num_value_heads"]
    keys = hf["linear_num_key_heads"] * hf["linear_key_head_dim"]
    values = heads * hf["linear_value_head_dim"]
    conv = joined(COLUMN, (keys, keys, values))
    out = [in_layer(layer, "input_layernorm", "input_layernorm", REPLICATED, (hidden,))]
    for name, megatron, cut, shape in (
        ("in_proj_qkvz.weight", "in_proj_qkvz.weight", COLUMN, (2 * keys + 2 * values, hidden)),
        ("in_proj_ba.weight", "in_proj_ba.weight", COLUMN, (2 * heads, hidden)),
        ("conv1d.weight", "conv_weight", conv, (2 * keys + values, 1, hf["linear_conv_kernel_dim"])),
        ("dt_bias", "dt_bias", COLUMN, (heads,)),
        ("A_log", "a_log", COLUMN, (heads,)),
        ("norm.weight", "norm_weight", REPLICATED, (hf["linear_value_head_dim"],)),
        ("out_proj.weight", "out_proj.weight", ROW, (hidden, values)),
    ):
        out.append(
            in_layer(layer, f"linear_attn.{name}", f"self_attention.{megatron}", cut, shape, suffix="")
        )
    return out


def _attention(hf: dict, layer: int) -> list[Weight]:
    """Return the norm before the attention and its weights; q_proj has a query and a gate per head."""
    dim, heads, groups = head_dim(hf), hf["num_attention_heads"], num_kv_heads(hf)
    norm, _, *rest = dense.attention(hf, layer, qk_norm=True)
    shapes = (2 * heads * dim, hf["hidden_size"]), *[(groups * dim, hf["hidden_size"])] * 2
    both = in_layer(
        layer,
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "self_attention.linear_qkv",
        gated_qkv(heads, groups, dim),
        *shapes,
        vllm="self_attn.qkv_proj.weight",
    )
    return [norm, both, *rest]


@functools.cache
def gated_qkv(num_heads: int, num_kv_heads: int, dim: int) -> Cut:
    """Return the cut of query, key and value, where each query head is followed by its gate.

    Megatron concatenates KV groups: queries, gates, key, value. vLLM concatenates a rank's queries with their
    gates, its keys and its values.
    """
    heads, per_rank = num_heads // num_kv_heads, kv_heads(num_kv_heads, dim).vllm

    def rows(name: str, shape: tuple[int, ...], start: int, at: int, size: int = dim) -> Piece:
        columns = (0, shape[1])
        return Piece(name, ((start, start + size), columns), ((at, at + size), columns))

    def megatron(names, shapes, tp, rank):
        groups = num_kv_heads // tp
        pieces, places = [], itertools.count(0, dim)
        for group in range(rank * groups, (rank + 1) * groups):
            for half in (0, 1):
                for head in range(group * heads, (group + 1) * heads):
                    pieces.append(rows(names[0], shapes[0], (2 * head + half) * dim, next(places)))
            for name, shape in zip(names[1:], shapes[1:]):
                pieces.append(rows(name, shape, group * dim, next(places)))
        return pieces

    def vllm(names, shapes, tp, rank):
        at = size = 2 * num_heads // tp * dim
        pieces = [rows(names[0], shapes[0], rank * size, 0, size)]
        for name, shape in zip(names[1:], shapes[1:]):
            (piece,) = per_rank((name,), (shape,), tp, rank)
            start, stop = piece.hf_box[0]
            pieces.append(rows(name, shape, start, at, stop - start))
            at += stop - start
        return pieces

    return Cut(megatron, vllm)
