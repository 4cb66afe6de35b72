"""Rotary embeddings: the rotation of each pair of channels per position, by the model's config.json.

In a run with exact numerics, trainer and engine both read `frequencies`. It is computed on the CPU on every
machine, because the power function of a GPU differs in the last bit and position p multiplies the difference
by p.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rl.models.sizes import head_dim

if TYPE_CHECKING:
    from torch import Tensor

GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""Keys of the rotary parameters of layers without and with a window, where they differ."""
PARTIAL = "partial_rotary_factor"
"""Key of the rotated part of a head's channels, in config.json or its rotary parameters."""
BASES = {
    "Gemma3ForCausalLM": 1e6,
    "SmolLM3ForCausalLM": 2e6,
    "MixtralForCausalLM": 1e6,
    "GptOssForCausalLM": 150000.0,
    "MiniMaxM2ForCausalLM": 5e6,
}
"""Architecture -> base of the rotary embedding if the config has none, as in transformers; 1e4 for others."""
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
KINDS = {"default": (), "linear": ("factor",), "dynamic": ("factor",), "llama3": LLAMA3, "yarn": ("factor",)}
"""Supported rope_type -> parameters that its config must have."""
YARN_OPTIONS = (
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    *("mscale", "mscale_all_dim"),
)


def rope_parameters(hf: dict, *, local: bool = False) -> dict:
    """Return the rotary parameters, always with `rope_theta` and `rope_type`.

    As in transformers 5, `rope_scaling` of older configs takes precedence over `rope_parameters`.
    local: return the parameters of layers with a window, if these layers have their own parameters.
    """
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    nested = hf.get("rope_parameters") or {}
    if local and has_local(hf):
        given = nested.get(LOCAL) or {"rope_theta": hf.get("rope_local_base_freq", 10000.0)}
    elif GLOBAL in given:
        given = given[GLOBAL]
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "default" if kind == "mrope" else kind  # Qwen2.5-VL's name for it, see `axes`
    part = {} if hf.get(PARTIAL) is None else {PARTIAL: hf[PARTIAL]}
    if hf.get("rotary_dim"):  # MiniMax-M2
        part = {PARTIAL: hf["rotary_dim"] / head_dim(hf)}
    base = next((BASES[name] for name in hf.get("architectures") or () if name in BASES), 10000.0)
    return {"rope_theta": hf.get("rope_theta", base)} | part | given | {"rope_type": kind}


def has_local(hf: dict) -> bool:
    """Return whether layers with a window have their own rotary parameters."""
    return _is_gemma(hf) or "rope_local_base_freq" in hf or LOCAL in (hf.get("rope_parameters") or {})


def scaled(hf: dict, scaling: dict) -> dict:
    """Return the config with the rotary scaling `scaling` (model.rope_scaling); {} leaves it as it is.

    The base stays, and `max_position_embeddings` becomes the length of the longer window. Raises ValueError
    for an unknown type or parameter.
    """
    if not scaling:
        return hf
    kind = scaling.get("rope_type")
    if kind not in KINDS:
        raise ValueError(f"model.rope_scaling={scaling} needs a rope_type, one of {', '.join(KINDS)}.")
    known = {"rope_type", "rope_theta", *KINDS[kind], *(YARN_OPTIONS if kind == "yarn" else ())}
    if unknown := sorted(scaling.keys() - known):
        raise ValueError(
            f"model.rope_scaling has {unknown[0]}={scaling[unknown[0]]!r}, which rope_type={kind} does not "
            f"read; its parameters are {', '.join(sorted(known - {'rope_type'}))}."
        )
    out = {name: value for name, value in hf.items() if name != "rope_parameters"}
    out |= {name: value for name, value in rope_parameters(hf).items() if name in ("rope_theta", PARTIAL)}
    out["rope_scaling"] = scaling
    if has_local(hf):
        out["rope_local_base_freq"] = rope_parameters(hf, local=True)["rope_theta"]
    if kind == "yarn":
        out["rope_scaling"] = {"original_max_position_embeddings": _original_context(hf)} | scaling
        out["max_position_embeddings"] = positions(out)
    elif _is_gemma(hf) and isinstance(factor := scaling.get("factor"), int | float):
        before = float(rope_parameters(hf).get("factor") or 1.0)
        out["max_position_embeddings"] = int(hf["max_position_embeddings"] / before * factor)
    return out


def rope_theta(hf: dict) -> float:
    """Return the base of the rotary embedding."""
    return float(rope_parameters(hf)["rope_theta"])


def rotated_channels(hf: dict) -> int:
    """Return the number of a head's first channels that are rotated, for example 64 of 256."""
    return hf.get("qk_rope_head_dim") or int(head_dim(hf) * rope_parameters(hf).get(PARTIAL, 1.0))


def positions(hf: dict) -> int:
    """Return the number of positions of the model, which no sequence may exceed.

    YaRN multiplies the original context: for example, factor 4 makes 32,768 positions 131,072. It does not
    matter which of these two numbers `max_position_embeddings` is. vLLM's table of rotations has the size of
    the product. Linear scaling multiplies `max_position_embeddings`, as in vLLM, except in Gemma 3, where
    `max_position_embeddings` is scaled already. Dynamic scaling adds no positions, because its frequencies
    depend on the length of a sequence. During generation a sequence grows by one token at a time, so the
    engine's probabilities would differ from the trainer's, which computes the whole sequence at once.
    """
    rope, given = rope_parameters(hf), hf["max_position_embeddings"]
    if rope["rope_type"] == "yarn":
        given = _original_context(hf)
    elif rope["rope_type"] != "linear" or _is_gemma(hf):
        return given
    return int(given * float(rope.get("factor") or 1.0))


def _is_gemma(hf: dict) -> bool:
    return "gemma3" in hf.get("model_type", "")


def _original_context(hf: dict) -> float:
    return rope_parameters(hf).get("original_max_position_embeddings") or hf["max_position_embeddings"]


def frequencies(hf: dict, *, local: bool = False) -> Tensor:
    """Return the angle of each pair of channels at position 1, float32 [channels / 2], on the CPU.

    local: for layers with a window.
    """
    import torch  # only training and generation call this

    rope, dim = rope_parameters(hf, local=local), rotated_channels(hf)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    powers = float(rope["rope_theta"]) ** exponents
    if rope["rope_type"] == "llama3":
        return _llama3(1.0 / powers, rope)
    if rope["rope_type"] == "yarn":
        return _yarn(powers, rope, _original_context(hf))
    return 1.0 / powers / (float(rope["factor"]) if rope["rope_type"] == "linear" else 1.0)


def axes(hf: dict) -> list[int]:
    """Return for each pair of channels the axis of an image's positions that rotates the pair.

    The axes are time (0), row (1) and column (2). The result is [] for a text model, because text has one
    axis. `mrope_section` has the number of pairs of each axis (arXiv:2409.12191, section 2.1): for example,
    [2, 1, 1] gives the axes 0, 0, 1, 2. With `mrope_interleaved`, the axes alternate as long as rows and
    columns have pairs left; all other pairs belong to time (transformers' Qwen3-VL).
    """
    rope = rope_parameters(hf)
    if rope.get("mrope_interleaved"):
        time, *others = rope["mrope_section"]
        out = [0] * (time + sum(others))
        for axis, size in enumerate(others, start=1):
            out[axis : 3 * size : 3] = [axis] * len(out[axis : 3 * size : 3])
        return out
    return [axis for axis, size in enumerate(rope.get("mrope_section") or ()) for _ in range(size)]


def magnitude(hf: dict) -> float:
    """Return the factor of cosines and sines, `attention_factor` in transformers; 1 except with YaRN.

    mscale and mscale_all_dim each give a factor 0.1 mscale ln(factor) + 1, and the result is the ratio of the
    two factors (DeepSeek-V2's modeling file). For latent attention, the square of the second factor scales
    the softmax. If one of the two keys is missing, the result is 0.1 ln(factor) + 1 (arXiv:2309.00071,
    section 3.4).
    """
    rope = rope_parameters(hf)
    if rope["rope_type"] != "yarn":
        return 1.0
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    growth = 0.1 * math.log(max(float(rope["factor"]), 1.0))
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if not (mscale and of_all):
        return growth + 1.0
    return (growth * float(mscale) + 1.0) / (growth * float(of_all) + 1.0)


def engine_fields(hf: dict) -> dict:
    """Return the keys of config.json with which vLLM rotates by `frequencies` and `magnitude`.

    vLLM reads `max_position_embeddings` as the limit of a sequence, with YaRN too. vLLM's linear scaling
    requires that the factor is a float.
    """
    rope = {name: value for name, value in rope_parameters(hf).items() if name != "type"}
    if axes(hf):
        return {}  # the published parameters, within `text_config`
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = _original_context(hf)
        return {"rope_parameters": rope, "max_position_embeddings": positions(hf)}
    if rope["rope_type"] == "dynamic":  # up to `positions`
        del rope["factor"]
        rope["rope_type"] = "default"
    elif rope["rope_type"] == "linear":
        rope["factor"] = float(rope["factor"])
    if has_local(hf):
        kinds = {GLOBAL: rope, LOCAL: rope_parameters(hf, local=True)}
        return {"rope_parameters": kinds, "max_position_embeddings": positions(hf)}
    return {"rope_parameters": rope}


def _llama3(plain: Tensor, rope: dict) -> Tensor:
    """Return the frequencies of Llama 3.1's scaling.

    A frequency f has the wavelength w = 2 pi / f tokens, and turns C / w times within the original context C.
    With more than `high_freq_factor` turns, f is unchanged. With fewer than `low_freq_factor` turns, it
    becomes f / factor. In between, the two values are interpolated linearly in C / w
    (meta-llama/llama-models, `apply_scaling`; `rope_type: llama3` in transformers). Megatron 0.16.1 supports
    only one value of C and of the frequency factors.
    """
    factor, low, high, context = (float(rope[name]) for name in LLAMA3)
    turns = context * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (kept + (1.0 - kept) / factor)


def _yarn(powers: Tensor, rope: dict, context: float) -> Tensor:
    """Return the frequencies of YaRN (arXiv:2309.00071, section 3.2).

    powers: inverse frequencies without scaling. context: the original number of positions. Frequencies of
    pairs that turn more than `beta_fast` times within the context are unchanged. Frequencies of pairs that
    turn less than `beta_slow` times are divided by `factor`. Between these two borders, the frequencies are
    interpolated linearly by the number of the pair. Unless `truncate` is false, both borders are rounded to
    whole pairs, outwards.
    """
    import torch

    base = float(rope["rope_theta"])

    def pair_with(turns: float) -> float:
        return len(powers) * math.log(context / (turns * 2 * math.pi)) / math.log(base)

    first, last = pair_with(float(rope.get("beta_fast") or 32)), pair_with(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(powers) - 1)
    numbers = torch.arange(len(powers), dtype=torch.float32, device="cpu")
    kept = 1.0 - ((numbers - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return 1.0 / (float(rope["factor"]) * powers) * (1.0 - kept) + 1.0 / powers * kept
