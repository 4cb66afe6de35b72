"""Mixtral: Mistral's attention, and in every layer a mixture of experts, of which each token takes two."""

from rl.models import dense, experts
from rl.models.dense import rope_theta  # noqa: F401 - part of an architecture's file
from rl.models.layout import Weight

ARCHITECTURES = ("MixtralForCausalLM",)


def megatron_config(hf: dict) -> dict:
    """Fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return dense.megatron_config(hf) | experts.megatron_fields(
        num_experts=hf["num_local_experts"],
        per_token=hf["num_experts_per_tok"],
        ffn=hf["intermediate_size"],
        renormalise=True,
        moe_layers=[True] * hf["num_hidden_layers"],
    )


def check(hf: dict) -> None:
    """Raise ValueError for a config that asks for what is not built here."""
    dense.check_decoder(hf, "Mixtral")
    if hf.get("sliding_window"):
        window = hf["sliding_window"]
        raise ValueError(
            f"Mixtral with sliding_window {window} is not supported; set it to null if the context is shorter anyway."
        )


def weights(hf: dict) -> list[Weight]:
    """Every parameter, in the order of the forward pass."""
    out = [dense.embedding(hf)]
    for layer in range(hf["num_hidden_layers"]):
        norm, *_ = dense.mlp(hf, layer)
        out += [*dense.attention(hf, layer), norm]
        out += experts.routed(
            hf,
            layer,
            block="block_sparse_moe",
            num_experts=hf["num_local_experts"],
            ffn=hf["intermediate_size"],
            names=("w1", "w3", "w2"),
        )
    return [*out, *dense.head(hf)]
