"""Qwen3-VL: a vision tower before a Qwen3; the Qwen3's first layers also receive the tower's inner outputs.

`deepstack_visual_indexes` names some layers of the tower. The outputs of the first of them are added to the
hidden states of the images' tokens after the first layer of the text model, the outputs of the second after
the second layer, and so on (arXiv:2406.04334). The text model is dense, or a Qwen3-MoE; the files hold its
experts in two tensors per layer.
"""

from dataclasses import replace
from itertools import groupby
from types import ModuleType

from rl.models import qwen3, qwen3_moe
from rl.models.layout import Stored, Weight, joined
from rl.models.qwen2_5_vl import check_axes, in_tower, linear
from rl.models.sizes import num_experts

DENSE, EXPERTS = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"
ARCHITECTURES = (DENSE, EXPERTS)


def tower_class(hf: dict) -> tuple[str, str]:
    """Return module and name of the tower's class in transformers.models."""
    if num_experts(hf):
        return "qwen3_vl_moe.modeling_qwen3_vl_moe", "Qwen3VLMoeVisionModel"
    return "qwen3_vl.modeling_qwen3_vl", "Qwen3VLVisionModel"


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return _text(hf).megatron_config(hf)


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    check_axes(hf, "Qwen3-VL", interleaved=True)
    if num_experts(hf) and not hf.get("norm_topk_prob"):
        raise ValueError(
            "Qwen3-VL with norm_topk_prob false is not supported: the published models have true."
        )
    _text(hf).check(hf)


def _text(hf: dict) -> ModuleType:
    return qwen3_moe if num_experts(hf) else qwen3


def weights(hf: dict) -> list[Weight]:
    """Return every parameter: first the tower's, then the text model's."""
    return with_tower(hf, _text(hf).weights(hf), transposed=True)


def with_tower(hf: dict, text: list[Weight], *, transposed: bool) -> list[Weight]:
    """Return the tower's parameters, then those of a text model, by their names behind the tower.

    transposed: whether the files hold an expert's matrices with rows and columns exchanged.
    """
    seen = [replace(weight, hf=(f"model.{weight.hf[0]}",)) for weight in tower(hf["vision_config"])]
    behind = []
    for weight in text:
        names = tuple(name.replace("model.", "model.language_model.", 1) for name in weight.hf)
        behind.append(replace(weight, hf=names, vllm=f"language_model.{weight.vllm}"))
    for is_expert, group in groupby(behind, lambda weight: weight.expert is not None):
        parts = list(group)
        if is_expert:  # gate and up of each, then down of each, as in the files
            parts = [_of_expert(part, num_experts(hf), transposed) for part in parts[::2] + parts[1::2]]
        seen += parts
    return seen


def _of_expert(weight: Weight, count: int, transposed: bool) -> Weight:
    """Return an expert's weight [rows, H] as a part of the layer's tensor [E, rows, H], or [E, H, rows]."""
    block, _, name = weight.hf[0].rpartition(f".{weight.expert}.")
    if len(weight.hf) == 2:  # gate and up
        name, rows = "gate_up_proj.weight", tuple(shape[0] for shape in weight.shapes)
        shape, cut = (sum(rows), weight.shapes[0][1]), joined(weight.cut, rows)
        weight = replace(weight, hf=(f"{block}.{weight.expert}.{name}",), shapes=(shape,), cut=cut)
    name = f"{block}.{name.removesuffix('.weight')}"
    return replace(weight, stored=Stored(name, weight.expert or 0, count, transposed=transposed))


def tower(vision: dict) -> list[Weight]:
    """Return the weights of the tower. vision: the tower's config, `vision_config` of config.json."""
    width, ffn, merged = vision["hidden_size"], vision["intermediate_size"], vision["spatial_merge_size"] ** 2
    size, frames = vision["patch_size"], vision["temporal_patch_size"]
    out = [
        in_tower("patch_embed.proj.weight", (width, vision.get("in_channels", 3), frames, size, size)),
        in_tower("patch_embed.proj.bias", (width,)),
        in_tower("pos_embed.weight", (vision["num_position_embeddings"], width)),
    ]
    for layer in range(vision["depth"]):
        block = f"blocks.{layer}."
        out += norm(f"{block}norm1", width) + norm(f"{block}norm2", width)
        out += linear(f"{block}attn.qkv", 3 * width, width) + linear(f"{block}attn.proj", width, width)
        out += linear(f"{block}mlp.linear_fc1", ffn, width) + linear(f"{block}mlp.linear_fc2", width, ffn)
    wide = merged * width
    inner = [f"deepstack_merger_list.{n}" for n in range(len(vision.get("deepstack_visual_indexes", ())))]
    for name, normed in (("merger", width), *((name, wide) for name in inner)):
        out += norm(f"{name}.norm", normed) + linear(f"{name}.linear_fc1", wide, wide)
        out += linear(f"{name}.linear_fc2", vision["out_hidden_size"], wide)
    return out


def norm(name: str, width: int) -> list[Weight]:
    """Return weight and bias [width] of a norm of the tower."""
    return [in_tower(f"{name}.{kind}", (width,)) for kind in ("weight", "bias")]
