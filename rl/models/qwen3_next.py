"""Qwen3-Next: three of four layers have gated delta nets in place of attention, the others a gated attention.

A quarter of a head's channels is rotated. All norms except the norm in delta nets multiply by 1 + weight.
The router and the experts are Qwen3-MoE's; a shared expert has a gate of its own. Checkpoints hold the
projections of a delta net in two tensors, with rows grouped by key head. Their layers for multi-token
prediction (`mtp.*`) are neither trained nor served nor exported.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

from rl.models import dense, experts, qwen3_moe
from rl.models.dense import in_layer
from rl.models.layout import COLUMN, REPLICATED, ROW, Cut, Piece, Weight, joined, kv_heads
from rl.models.sizes import head_dim, is_tied, layer_kinds, num_kv_heads

ARCHITECTURES = ("Qwen3NextForCausalLM",)
KINDS = {"linear_attention", "full_attention"}
SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
"""Sizes of delta nets: the keys of config.json and Megatron's fields are both `linear_` and one of these."""


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return qwen3_moe.megatron_config({"norm_topk_prob": True} | hf) | shared_fields(hf) | mixer_fields(hf)


def mixer_fields(hf: dict) -> dict:
    """Return the fields for gated delta nets, gated attention and the norms."""
    return {f"linear_{name}": hf[f"linear_{name}"] for name in SIZES} | dict(
        layernorm_zero_centered_gamma=True,
        qk_layernorm=True,
        attention_output_gate=True,
        linear_attention_freq=[int(kind == "linear_attention") for kind in layer_kinds(hf)],
    )


def shared_fields(hf: dict) -> dict:
    """Return the fields for the shared expert."""
    width = hf["shared_expert_intermediate_size"]
    return dict(moe_shared_expert_intermediate_size=width, moe_shared_expert_gate=True)


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    check_mixers(hf, "Qwen3-Next")
    if is_tied(hf):
        raise ValueError(
            "Qwen3-Next with tie_word_embeddings is not supported: vLLM reads a head of its own."
        )
    if not any(qwen3_moe.moe_layers(hf)):
        raise ValueError("Qwen3-Next without a layer of experts is not supported.")


def check_mixers(hf: dict, family: str) -> None:
    """Raise ValueError, naming the family, for unsupported options of attention and delta nets."""
    dense.check_decoder(hf, family, partial=True)
    dense.refuse_sliding_window(hf, family)
    dense.refuse_biases(hf, family, "attention_bias")
    if unknown := set(layer_kinds(hf)) - KINDS:
        raise ValueError(f"{family} with {sorted(unknown)[0]} in layer_types is not supported.")
    keys, values = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    if values % keys:
        raise ValueError(
            f"{family} with linear_num_value_heads {values} is not supported: it must be a multiple of "
            f"linear_num_key_heads {keys}."
        )


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass."""
    out = [dense.embedding(hf)]
    for layer, (kind, is_moe) in enumerate(zip(layer_kinds(hf), qwen3_moe.moe_layers(hf))):
        out += attention(hf, layer) if kind == "full_attention" else delta_net(hf, layer, _grouped(hf, layer))
        norm, *mlp = dense.mlp(hf, layer)
        out += [norm, *(mixture(hf, layer) if is_moe else mlp)]
    return [*out, *dense.head(hf)]


def mixture(hf: dict, layer: int) -> list[Weight]:
    """Return router, routed experts, the shared expert and its gate [1, H]."""
    hidden, width = hf["hidden_size"], hf["shared_expert_intermediate_size"]
    out = [experts.router(hf, layer, "mlp"), *experts.routed(hf, layer, "mlp")]
    for weight in dense.swiglu(layer, "mlp.shared_expert", hidden, width):
        out.append(replace(weight, megatron=weight.megatron.replace("shared_expert.", "shared_experts.")))
    name, megatron = "mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight"
    return [*out, in_layer(layer, name, megatron, REPLICATED, (1, hidden), suffix="")]


def delta_widths(hf: dict) -> tuple[int, int]:
    """Return the channels of all keys, and of all values, of a delta net."""
    keys = hf["linear_num_key_heads"] * hf["linear_key_head_dim"]
    return keys, hf["linear_num_value_heads"] * hf["linear_value_head_dim"]


def _grouped(hf: dict, layer: int) -> list[Weight]:
    """Return the two projections, with rows grouped by key head.

    In in_proj_qkvz, a key head has the rows of its query, key, values and gates; in in_proj_ba, the rows of
    its betas and decays.
    """
    hidden, heads, (keys, values) = hf["hidden_size"], hf["linear_num_value_heads"], delta_widths(hf)
    return [
        in_layer(layer, f"linear_attn.{name}", f"self_attention.{name}", COLUMN, (rows, hidden))
        for name, rows in (("in_proj_qkvz", 2 * keys + 2 * values), ("in_proj_ba", 2 * heads))
    ]


def delta_net(hf: dict, layer: int, projections: Sequence[Weight]) -> list[Weight]:
    """Return the norm before a delta net, its projections, and its other weights.

    conv1d [channels, 1, taps] has the channels of all queries, of all keys, of all values.
    """
    hidden, heads, (keys, values) = hf["hidden_size"], hf["linear_num_value_heads"], delta_widths(hf)
    conv = joined(COLUMN, (keys, keys, values))
    out = [in_layer(layer, "input_layernorm", "input_layernorm", REPLICATED, (hidden,)), *projections]
    for name, megatron, cut, shape in (
        ("conv1d.weight", "conv_weight", conv, (2 * keys + values, 1, hf["linear_conv_kernel_dim"])),
        ("dt_bias", "dt_bias", COLUMN, (heads,)),
        ("A_log", "a_log", COLUMN, (heads,)),
        ("norm.weight", "norm_weight", REPLICATED, (hf["linear_value_head_dim"],)),
        ("out_proj.weight", "out_proj.weight", ROW, (hidden, values)),
    ):
        names = f"linear_attn.{name}", f"self_attention.{megatron}"
        out.append(in_layer(layer, *names, cut, shape, suffix=""))
    return out


def attention(hf: dict, layer: int) -> list[Weight]:
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

    def megatron(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
        groups = num_kv_heads // tp
        pieces, places = [], itertools.count(0, dim)
        for group in range(rank * groups, (rank + 1) * groups):
            for half in (0, 1):
                for head in range(group * heads, (group + 1) * heads):
                    pieces.append(rows(names[0], shapes[0], (2 * head + half) * dim, next(places)))
            for name, shape in zip(names[1:], shapes[1:]):
                pieces.append(rows(name, shape, group * dim, next(places)))
        return pieces

    def vllm(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
        at = size = 2 * num_heads // tp * dim
        pieces = [rows(names[0], shapes[0], rank * size, 0, size)]
        for name, shape in zip(names[1:], shapes[1:]):
            (piece,) = per_rank((name,), (shape,), tp, rank)
            start, stop = piece.hf_box[0]
            pieces.append(rows(name, shape, start, at, stop - start))
            at += stop - start
        return pieces

    return Cut(megatron, vllm)
