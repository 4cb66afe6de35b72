"""Qwen3.5, text: Qwen3-Next's layers, dense or with experts in all of them.

Checkpoints hold the projections of a delta net in four tensors. The published checkpoints have a vision tower
and another class. `lockstep model text` writes their text model, with a class of `ARCHITECTURES`.
"""

import functools
from collections.abc import Sequence

from rl.models import dense, experts, qwen3_next
from rl.models.dense import in_layer
from rl.models.layout import Cut, Piece, Weight
from rl.models.sizes import layer_kinds, num_experts

ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    fields = dense.megatron_config(hf) | qwen3_next.mixer_fields(hf)
    if num_experts(hf):
        moe_layers = [True] * hf["num_hidden_layers"]
        fields |= experts.megatron_fields(hf, renormalise=True, moe_layers=moe_layers)
        fields |= qwen3_next.shared_fields(hf)
    return fields


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    qwen3_next.check_mixers(hf, "Qwen3.5")
    for key, value in (("attn_output_gate", True), ("output_gate_type", "swish"), ("norm_topk_prob", True)):
        if hf.get(key, value) != value:
            raise ValueError(f"Qwen3.5 with {key} {hf[key]} is not supported; only {value} is.")


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass."""
    out = [dense.embedding(hf)]
    for layer, kind in enumerate(layer_kinds(hf)):
        if kind == "full_attention":
            out += qwen3_next.attention(hf, layer)
        else:
            out += qwen3_next.delta_net(hf, layer, _projections(hf, layer))
        norm, *mlp = dense.mlp(hf, layer)
        out += [norm, *(qwen3_next.mixture(hf, layer) if num_experts(hf) else mlp)]
    return [*out, *dense.head(hf)]


def _projections(hf: dict, layer: int) -> list[Weight]:
    """Return in_proj_qkv with in_proj_z, and in_proj_b with in_proj_a, as two parameters."""
    hidden, groups, heads = hf["hidden_size"], hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    keys, values = qwen3_next.delta_widths(hf)
    key, value = keys // groups, values // groups
    parts = (0, 0, key), (0, keys, key), (0, 2 * keys, value), (1, 0, value)
    qkvz, ba = (
        by_key_head(groups, parts),
        by_key_head(groups, ((0, 0, heads // groups), (1, 0, heads // groups))),
    )
    return [
        in_layer(
            layer,
            f"linear_attn.{first} linear_attn.{second}",
            f"self_attention.{name}",
            cut,
            *((size, hidden) for size in sizes),
            vllm=f"linear_attn.{name}.weight",
        )
        for name, first, second, cut, sizes in (
            ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", qkvz, (2 * keys + values, values)),
            ("in_proj_ba", "in_proj_b", "in_proj_a", ba, (heads, heads)),
        )
    ]


@functools.cache
def by_key_head(groups: int, parts: tuple[tuple[int, int, int], ...]) -> Cut:
    """Return how tensor parallel ranks split tensors that consist of blocks of rows.

    A block has the rows of the first key head, then the rows of the second key head, and so on.
    Megatron's parameter has one key head after the other, each with its rows of all blocks. vLLM's parameter
    has one block after the other, each with the rank's rows of the block.

    parts: for each block the index of its tensor, its first row, and its number of rows per key head.
    """

    def pieces(names: Sequence[str], shapes: Sequence[tuple[int, ...]], heads: range, at: int) -> list[Piece]:
        """Return the rows of some adjacent key heads, which begin at local row `at`."""
        out = []
        for tensor, first, size in parts:
            rows = first + heads.start * size, first + heads.stop * size
            columns = (0, shapes[tensor][1])
            out.append(Piece(names[tensor], (rows, columns), ((at, at + rows[1] - rows[0]), columns)))
            at += rows[1] - rows[0]
        return out

    def megatron(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
        own, size = range(rank * groups // tp, (rank + 1) * groups // tp), sum(size for *_, size in parts)
        heads = [pieces(names, shapes, range(head, head + 1), at * size) for at, head in enumerate(own)]
        return [piece for of_head in heads for piece in of_head]

    def vllm(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
        return pieces(names, shapes, range(rank * groups // tp, (rank + 1) * groups // tp), 0)

    return Cut(megatron, vllm)
