"""Qwen3-VL, dense: a vision tower, and a Qwen3 whose first layers also receive the tower's inner outputs.

The outputs of some layers of the tower (`deepstack_visual_indexes`) are added to the hidden states of the
images' tokens after the first layers of the text model, one each (arXiv:2406.04334).
"""

from dataclasses import replace

from rl.models import qwen3
from rl.models.layout import Weight
from rl.models.qwen2_5_vl import check_axes, in_tower, linear

ARCHITECTURES = ("Qwen3VLForConditionalGeneration",)
TOWER_CLASS = "qwen3_vl.modeling_qwen3_vl", "Qwen3VLVisionModel"
"""Module and name of the tower's class in transformers.models."""

megatron_config = qwen3.megatron_config


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    check_axes(hf, "Qwen3-VL", interleaved=True)
    qwen3.check(hf)


def weights(hf: dict) -> list[Weight]:
    """Return every parameter: those of the tower, then those of the text model."""
    out = []
    for weight in tower(hf["vision_config"]):
        out.append(replace(weight, hf=tuple(f"model.{name}" for name in weight.hf)))
    for weight in qwen3.weights(hf):
        names = tuple(name.replace("model.", "model.language_model.", 1) for name in weight.hf)
        out.append(replace(weight, hf=names, vllm=f"language_model.{weight.vllm}"))
    return out


def tower(vision: dict) -> list[Weight]:
    """Return the weights of the tower. `D` its width, `F` its intermediate size, `m` patches per token."""
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
    inner = [f"deepstack_merger_list.{n}" for n in range(len(vision["deepstack_visual_indexes"]))]
    for name, normed in (("merger", width), *((name, wide) for name in inner)):
        out += norm(f"{name}.norm", normed) + linear(f"{name}.linear_fc1", wide, wide)
        out += linear(f"{name}.linear_fc2", vision["out_hidden_size"], wide)
    return out


def norm(name: str, width: int) -> list[Weight]:
    """Return weight and bias [width] of a norm of the tower."""
    return [in_tower(f"{name}.{kind}", (width,)) for kind in ("weight", "bias")]
