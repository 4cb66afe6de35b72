"""Seed-OSS 36B: dense decoder with biases on query, key and value, and a head_dim of its own."""

from rl.models import dense
from rl.models.layout import Weight

ARCHITECTURES = ("SeedOssForCausalLM",)


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return dense.megatron_config(hf) | dict(add_qkv_bias=hf.get("attention_bias", True))


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "Seed-OSS")
    dense.refuse_biases(hf, "Seed-OSS", "attention_out_bias", "mlp_bias")


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass."""
    return dense.weights(hf, qkv_bias=hf.get("attention_bias", True))
