"""Qwen3, dense: Qwen2 without biases, with query and key norms per head and its own head_dim."""

from rl.models import dense
from rl.models.layout import Weight

ARCHITECTURES = ("Qwen3ForCausalLM",)


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return dense.megatron_config(hf) | dict(qk_layernorm=True)


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "Qwen3")
    dense.refuse_sliding_window(hf, "Qwen3")
    dense.refuse_biases(hf, "Qwen3", "attention_bias")


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass."""
    return dense.weights(hf, qk_norm=True)
