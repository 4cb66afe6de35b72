"""Qwen3-MoE: Qwen3's attention with RMSNorm over the channels of queries and keys, and mixtures of many small experts."""

from rl.models import dense, experts
from rl.models.dense import rope_theta  # noqa: F401 - part of an architecture's file
from rl.models.layout import Weight

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def megatron_config(hf: dict) -> dict:
    """Fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    mixture = experts.megatron_fields(
        num_experts=num_experts(hf),
        per_token=hf["num_experts_per_tok"],
        ffn=hf["moe_intermediate_size"],
        renormalise=hf.get("norm_topk_prob", False),
        moe_layers=moe_layers(hf),
    )
    return dense.megatron_config(hf) | mixture | dict(qk_layernorm=True)


def num_experts(hf: dict) -> int:
    """Routed experts of a layer; transformers 5 writes another key than the published configs have."""
    return hf.get("num_experts") or hf["num_local_experts"]


def moe_layers(hf: dict) -> list[bool]:
    """Which layers are mixtures; the others have an MLP of `intermediate_size`."""
    every, dense_ones = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    return [layer not in dense_ones and (layer + 1) % every == 0 for layer in range(hf["num_hidden_layers"])]


def check(hf: dict) -> None:
    """Raise ValueError for a config that asks for what is not built here."""
    dense.check_decoder(hf, "Qwen3-MoE")
    dense.refuse_sliding_window(hf, "Qwen3-MoE")
    dense.refuse_biases(hf, "Qwen3-MoE", "attention_bias")
    if not any(moe_layers(hf)):
        raise ValueError(
            "Qwen3-MoE without a layer of experts is not supported; as a Qwen3ForCausalLM it would be."
        )


def weights(hf: dict) -> list[Weight]:
    """Every parameter, in the order of the forward pass."""
    out = [dense.embedding(hf)]
    for layer, is_moe in enumerate(moe_layers(hf)):
        norm, *mlp = dense.mlp(hf, layer)
        out += [*dense.attention(hf, layer, qk_norm=True), norm]
        if is_moe:
            mlp = experts.routed(
                hf,
                layer,
                block="mlp",
                num_experts=num_experts(hf),
                ffn=hf["moe_intermediate_size"],
                names=("gate_proj", "up_proj", "down_proj"),
            )
        out += mlp
    return [*out, *dense.head(hf)]
