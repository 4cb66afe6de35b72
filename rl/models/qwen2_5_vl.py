"""Qwen2.5-VL: a vision tower before a Qwen2; the tower's outputs replace the embeddings of image tokens.

Every rank of the first pipeline stage holds the whole tower, and so does every rank of an engine.
"""

from dataclasses import replace

from rl.models import dense, qwen2
from rl.models.layout import REPLICATED, TOWER, Cut, Weight, rows_from
from rl.models.rope import rope_parameters

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration",)

megatron_config = qwen2.megatron_config


def tower_class(hf: dict) -> tuple[str, str]:
    """Return module and name of the tower's class in transformers.models."""
    return "qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    check_axes(hf, "Qwen2.5-VL")
    qwen2.check(hf)
    if hf["vision_config"].get("hidden_act", "silu") != "silu":
        raise ValueError("Qwen2.5-VL with another activation than silu in its vision tower is not supported.")


def check_axes(hf: dict, family: str, *, interleaved: bool = False) -> None:
    """Raise ValueError unless the rotary embedding is the plain one with three axes.

    interleaved: whether the pairs of channels of the axes alternate, as in Qwen3-VL.
    """
    rope = rope_parameters(hf)
    if bool(rope.get("mrope_interleaved")) != interleaved:
        raise ValueError(
            f"{family} with mrope_interleaved {rope.get('mrope_interleaved')} is not supported; published "
            f"models have {str(interleaved).lower()}."
        )
    if rope["rope_type"] != "default" or len(rope.get("mrope_section") or ()) != 3:
        raise ValueError(
            f"{family} with rope_type {rope['rope_type']} and mrope_section {rope.get('mrope_section')} is "
            "not supported; only the published default with three sections is."
        )


def weights(hf: dict) -> list[Weight]:
    """Return every parameter: first the tower's, then the text model's."""
    text = dense.weights(hf, qkv_bias=True)
    return [*tower(hf["vision_config"]), *map(_behind_tower, text)]


def _behind_tower(weight: Weight) -> Weight:
    """Return a text model's weight under its name in a model with a tower; its name in files is the same."""
    names = range(len(weight.hf))
    modules = tuple(weight.module(n).replace("model.", "model.language_model.", 1) for n in names)
    return replace(weight, vllm=f"language_model.{weight.vllm}", modules=modules)


def tower(vision: dict) -> list[Weight]:
    """Return the weights of the tower. vision: the tower's config, `vision_config` of config.json."""
    width, ffn, merged = vision["hidden_size"], vision["intermediate_size"], vision["spatial_merge_size"] ** 2
    size, frames = vision["patch_size"], vision["temporal_patch_size"]
    channels = vision.get("in_channels", vision.get("in_chans", 3))
    out = [in_tower("patch_embed.proj.weight", (width, channels, frames, size, size))]
    for layer in range(vision["depth"]):
        block = f"blocks.{layer}."
        out += [in_tower(f"{block}{name}.weight", (width,)) for name in ("norm1", "norm2")]
        out += linear(f"{block}attn.qkv", 3 * width, width) + linear(f"{block}attn.proj", width, width)
        for number, name in enumerate(("gate_proj", "up_proj")):  # vLLM holds both in one parameter
            fused = dict(vllm=f"{block}mlp.gate_up_proj", first_row=number * ffn)
            out += linear(f"{block}mlp.{name}", ffn, width, **fused)
        out += linear(f"{block}mlp.down_proj", width, ffn)
    out.append(in_tower("merger.ln_q.weight", (width,)))
    out += linear("merger.mlp.0", merged * width, merged * width)
    return out + linear("merger.mlp.2", vision["out_hidden_size"], merged * width)


def linear(name: str, rows: int, columns: int, *, vllm: str = "", first_row: int = 0) -> list[Weight]:
    """Return weight [rows, columns] and bias [rows] of a layer of the tower.

    vllm: the name of vLLM's layer, if vLLM holds this layer as a part of a larger one. first_row: the row of
    vLLM's layer at which this layer begins.
    """
    cut = rows_from(first_row) if vllm else REPLICATED
    return [
        in_tower(f"{name}.{kind}", shape, vllm=f"{vllm or name}.{kind}", cut=cut)
        for kind, shape in (("weight", (rows, columns)), ("bias", (rows,)))
    ]


def in_tower(name: str, shape: tuple[int, ...], *, vllm: str = "", cut: Cut = REPLICATED) -> Weight:
    """Return a weight of the tower, given its name within it."""
    return Weight((TOWER + name,), (shape,), TOWER + name, TOWER + (vllm or name), cut, first_stage=True)
