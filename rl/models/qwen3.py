"""Qwen3, dense: as Qwen2, but queries and keys are normalised per head instead of having biases, and heads have a size of
their own (`head_dim` is not hidden / heads)."""

from rl.models import dense
from rl.models.layout import Weight

ARCHITECTURES = ("Qwen3ForCausalLM",)

rope_theta = dense.rope_theta


def megatron_config(hf: dict) -> dict:
    """Fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return dense.megatron_config(hf) | dict(qk_layernorm=True)


def check(hf: dict) -> None:
    """Raise ValueError for a config that asks for what is not built here."""
    dense.check_decoder(hf, "Qwen3")
    dense.refuse_sliding_window(hf, "Qwen3")
    dense.refuse_biases(hf, "Qwen3", "attention_bias")


def weights(hf: dict) -> list[Weight]:
    """Every parameter, in the order of the forward pass."""
    return dense.weights(hf, qk_norm=True)
