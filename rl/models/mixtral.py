"""Mixtral: Mistral's attention, and a mixture of experts in every layer; each token uses two experts."""

from rl.models import dense, experts
from rl.models.layout import Weight

ARCHITECTURES = ("MixtralForCausalLM",)


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    moe_layers = [True] * hf["num_hidden_layers"]
    return dense.megatron_config(hf) | experts.megatron_fields(hf, renormalise=True, moe_layers=moe_layers)


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "Mixtral")
    if window := hf.get("sliding_window"):
        raise ValueError(
            f"Mixtral with sliding_window {window} is not supported; set it to null if no sequence exceeds "
            "the window."
        )


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass."""
    block, out = "block_sparse_moe", [dense.embedding(hf)]
    for layer in range(hf["num_hidden_layers"]):
        norm, *_ = dense.mlp(hf, layer)
        out += [*dense.attention(hf, layer), norm, experts.router(hf, layer, block)]
        out += experts.routed(hf, layer, block, gate="w1", up="w3", down="w2")
    return [*out, *dense.head(hf)]
