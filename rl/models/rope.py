"""Rotary embeddings: the rotation of each pair of channels per position, by the model's config.json.

Trainer and engine of a run with exact numerics read `frequencies`, which is computed on the CPU on every
machine: the power function of a GPU differs in the last bit, and position p multiplies the difference by p.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rl.models.sizes import head_dim

if TYPE_CHECKING:
    from torch import Tensor

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Parameters of rope_type llama3."""


def rope_parameters(hf: dict) -> dict:
    """Return the rotary parameters, always with `rope_theta` and `rope_type`.

    As in transformers 5, `rope_scaling` of older configs takes precedence over `rope_parameters`.
    """
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    return {"rope_theta": hf.get("rope_theta", 10000.0)} | given | {"rope_type": kind}


def rope_theta(hf: dict) -> float:
    """Return the base of the rotary embedding."""
    return float(rope_parameters(hf)["rope_theta"])


def rotated_channels(hf: dict) -> int:
    """Return the number of channels of a head that are rotated; all but latent attention rotate the head."""
    return hf.get("qk_rope_head_dim") or head_dim(hf)


def frequencies(hf: dict) -> Tensor:
    """Return the angle of each pair of channels at position 1, float32 [channels / 2], on the CPU."""
    import torch  # only training and generation call this

    rope, dim = rope_parameters(hf), rotated_channels(hf)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    powers = rope_theta(hf) ** exponents
    if rope["rope_type"] == "llama3":
        return _llama3(1.0 / powers, rope)
    return _yarn(powers, rope) if rope["rope_type"] == "yarn" else 1.0 / powers


def magnitude(hf: dict) -> float:
    """Return the factor of cosines and sines.

    With YaRN, mscale and mscale_all_dim each give a factor 0.1 mscale ln(factor) + 1, and this is their ratio
    (DeepSeek-V2's modeling file). The square of the second factor scales the softmax.
    """
    rope = rope_parameters(hf)
    if rope["rope_type"] != "yarn":
        return 1.0
    growth = 0.1 * math.log(float(rope["factor"]))
    return (growth * float(rope["mscale"]) + 1.0) / (growth * float(rope["mscale_all_dim"]) + 1.0)


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


def _yarn(powers: Tensor, rope: dict) -> Tensor:
    """Return the frequencies of YaRN (arXiv:2309.00071, section 3.2).

    powers: inverse frequencies without scaling. Pairs that turn more than `beta_fast` times within the
    original context are unchanged, those that turn less than `beta_slow` times are divided by `factor`. The
    pairs between are interpolated by their number; both borders are rounded to whole pairs, outwards.
    """
    import torch

    context, base = float(rope["original_max_position_embeddings"]), float(rope["rope_theta"])

    def pair_with(turns: float) -> float:
        return len(powers) * math.log(context / (turns * 2 * math.pi)) / math.log(base)

    first = max(math.floor(pair_with(float(rope.get("beta_fast", 32)))), 0)
    last = min(math.ceil(pair_with(float(rope.get("beta_slow", 1)))), 2 * len(powers) - 1)
    numbers = torch.arange(len(powers), dtype=torch.float32, device="cpu")
    kept = 1.0 - ((numbers - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return 1.0 / (float(rope["factor"]) * powers) * (1.0 - kept) + 1.0 / powers * kept
