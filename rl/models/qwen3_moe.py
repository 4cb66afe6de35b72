"""Qwen3-MoE: Qwen3's attention, and mixtures of many small experts."""

from rl.models import dense, experts
from rl.models.layout import Weight

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    renormalise = hf.get("norm_topk_prob", False)
    mixture = experts.megatron_fields(hf, renormalise=renormalise, moe_layers=moe_layers(hf))
    return dense.megatron_config(hf) | mixture | dict(qk_layernorm=True)


def moe_layers(hf: dict) -> list[bool]:
    """Return for each layer whether it is a mixture; the others have an MLP of `intermediate_size`."""
    every, dense_ones = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    return [layer not in dense_ones and (layer + 1) % every == 0 for layer in range(hf["num_hidden_layers"])]


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "Qwen3-MoE")
    dense.refuse_sliding_window(hf, "Qwen3-MoE")
    dense.refuse_biases(hf, "Qwen3-MoE", "attention_bias")
    if not any(moe_layers(hf)):
        raise ValueError(
            "Qwen3-MoE without a layer of experts is not supported; use Qwen3ForCausalLM for a dense model."
        )


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass."""
    out = [dense.embedding(hf)]
    for layer, is_moe in enumerate(moe_layers(hf)):
        norm, *mlp = dense.mlp(hf, layer)
        if is_moe:
            mlp = [experts.router(hf, layer, "mlp"), *experts.routed(hf, layer, "mlp")]
        out += [*dense.attention(hf, layer, qk_norm=True), norm, *mlp]
    return [*out, *dense.head(hf)]
