"""Mistral 7B from v0.2 on, Nemo, Small and Large: Llama's decoder, with heads of a size of their own in some, without a
sliding window."""

from rl.models import dense
from rl.models.layout import Weight

ARCHITECTURES = ("MistralForCausalLM",)

rope_theta = dense.rope_theta


def megatron_config(hf: dict) -> dict:
    """Fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return dense.megatron_config(hf)


def check(hf: dict) -> None:
    """Raise ValueError for a config that asks for what is not built here."""
    dense.check_decoder(hf, "Mistral")
    window = hf.get("sliding_window", 4096)  # transformers' default where the key is absent
    if window is not None:
        raise ValueError(
            f"Mistral with sliding_window {window} is not supported; set it to null in config.json if no prompt and response "
            "together are longer."
        )


def weights(hf: dict) -> list[Weight]:
    """Every parameter, in the order of the forward pass."""
    return dense.weights(hf)
