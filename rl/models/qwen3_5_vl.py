"""Qwen3.5 with its vision tower: Qwen3-VL's tower without inner outputs, before a dense or a mixed Qwen3.5.

The files hold the experts of a layer in two tensors. Their layers for multi-token prediction (`mtp.*`) are
neither trained nor served nor exported.
"""

from rl.models import qwen3_5, qwen3_vl
from rl.models.layout import Weight
from rl.models.qwen2_5_vl import check_axes
from rl.models.sizes import num_experts

ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")

megatron_config = qwen3_5.megatron_config


def tower_class(hf: dict) -> tuple[str, str]:
    """Return module and name of the tower's class in transformers.models."""
    if num_experts(hf):
        return "qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeVisionModel"
    return "qwen3_5.modeling_qwen3_5", "Qwen3_5VisionModel"


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    check_axes(hf, "Qwen3.5", interleaved=True)
    qwen3_5.check(hf)


def weights(hf: dict) -> list[Weight]:
    """Return every parameter: first the tower's, then the text model's."""
    return qwen3_vl.with_tower(hf, qwen3_5.weights(hf), transposed=False)
