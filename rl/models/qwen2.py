"""Qwen2 and Qwen2.5: dense decoder, grouped-query attention with biases on query, key and value, RMSNorm, SwiGLU."""

from rl.models import dense
from rl.models.layout import Weight

ARCHITECTURES = ("Qwen2ForCausalLM",)

head_dim = dense.head_dim
rope_theta = dense.rope_theta


def megatron_config(hf: dict) -> dict:
    """Fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return dense.megatron_config(hf) | dict(add_qkv_bias=True)


def check(hf: dict) -> None:
    """Raise ValueError for a config that asks for what is not built here."""
    dense.check_decoder(hf, "Qwen2")
    dense.refuse_sliding_window(hf, "Qwen2")


def weights(hf: dict) -> list[Weight]:
    """Every parameter, in the order of the forward pass."""
    return dense.weights(hf, qkv_bias=True)
