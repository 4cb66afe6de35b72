"""Gemma 3, text: norms before and after attention and MLP, most layers with a sliding window.

Layers with a window have their own rotary embedding. Norms multiply by 1 + weight. The embedding is
multiplied by the square root of the hidden size. Only models of one modality, text, are read (1B, 270M, and
others with this class).
"""

from rl.models import dense
from rl.models.dense import in_layer
from rl.models.layer_form import LayerForm
from rl.models.layout import REPLICATED, Weight

ARCHITECTURES = ("Gemma3ForCausalLM",)
UNREAD_TOKENS = ("<image_soft_token>",)
"""Tokens of the published tokenizer that lack a row in the embedding of text-only models."""


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    windowed = [int(kind == "sliding_attention") for kind in layer_types(hf)]
    fields = dense.megatron_config(hf) | dict(qk_layernorm=True, layernorm_zero_centered_gamma=True)
    if any(windowed):
        fields |= dict(window_size=(hf["sliding_window"] - 1, 0), window_attn_skip_freq=windowed)
    return fields | dict(softmax_scale=hf["query_pre_attn_scalar"] ** -0.5)


def form(hf: dict) -> LayerForm:
    """Return what sets the layers apart from Megatron's."""
    return LayerForm(
        embedding_scale=hf["hidden_size"] ** 0.5,
        post_norms=True,
        activation="gelu_tanh",
        windowed=tuple(kind == "sliding_attention" for kind in layer_types(hf)),
    )


def layer_types(hf: dict) -> list[str]:
    """Return sliding_attention or full_attention for each layer."""
    every, layers = hf.get("sliding_window_pattern", 6), range(hf["num_hidden_layers"])
    kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in layers]
    return hf.get("layer_types") or kinds


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    activation = hf.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ValueError(f"Gemma 3 with hidden_activation {activation} is not supported.")
    dense.check_decoder(hf | {"hidden_act": "silu"}, "Gemma 3", rope_kinds=("default", "linear"))
    dense.refuse_biases(hf, "Gemma 3", "attention_bias")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if hf.get(key):
            raise ValueError(
                f"Gemma 3 with {key} {hf[key]} is not supported: the trainer's attention and head are causal "
                "and have no tanh; use a model without it."
            )
    if "sliding_attention" in layer_types(hf) and not hf.get("sliding_window"):
        raise ValueError(
            "Gemma 3 with sliding_attention in layer_types needs a sliding_window of at least 1."
        )
    if unknown := set(layer_types(hf)) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"Gemma 3 with {sorted(unknown)[0]} in layer_types is not supported.")


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass."""
    out, shape = [dense.embedding(hf)], (hf["hidden_size"],)
    for layer in range(hf["num_hidden_layers"]):
        after = "post_attention_layernorm", "self_attention.post_norm"
        before_mlp = "pre_feedforward_layernorm", "pre_mlp_layernorm"
        after_mlp = "post_feedforward_layernorm", "mlp.post_norm"
        norms = [in_layer(layer, *names, REPLICATED, shape) for names in (after, before_mlp, after_mlp)]
        _, *mlp = dense.mlp(hf, layer)
        out += [*dense.attention(hf, layer, qk_norm=True), *norms[:2], *mlp, norms[2]]
    return [*out, *dense.head(hf)]
