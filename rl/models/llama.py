"""Llama 2 and 3.x: the plain dense decoder, without biases. 3.1 and later scale the slow rotary frequencies (`rope_type:
llama3`); the small models of 3.2 have a tied embedding."""

from rl.models import dense
from rl.models.layout import Weight

ARCHITECTURES = ("LlamaForCausalLM",)

rope_theta = dense.rope_theta


def megatron_config(hf: dict) -> dict:
    """Fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return dense.megatron_config(hf)


def check(hf: dict) -> None:
    """Raise ValueError for a config that asks for what is not built here."""
    dense.check_decoder(hf, "Llama", rope_kinds=("default", "llama3"))
    dense.refuse_biases(hf, "Llama", "attention_bias", "mlp_bias")


def weights(hf: dict) -> list[Weight]:
    """Every parameter, in the order of the forward pass."""
    return dense.weights(hf)
