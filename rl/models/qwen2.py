"""Qwen2 and Qwen2.5: dense decoder, grouped-query attention with biases on query, key and value."""

from rl.models import dense
from rl.models.layout import Weight

ARCHITECTURES = ("Qwen2ForCausalLM",)


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return dense.megatron_config(hf) | dict(add_qkv_bias=True)


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "Qwen2")
    dense.refuse_sliding_window(hf, "Qwen2")


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass."""
    return dense.weights(hf, qkv_bias=True)
