"""Granite 3, dense: Llama's decoder with four factors.

The first multiplies the embedding, the second the scores of the attention. The third multiplies the outputs
of attention and MLP before they are added to the residual. The fourth divides the logits.
"""

from rl.models import dense
from rl.models.layer_form import LayerForm

ARCHITECTURES = ("GraniteForCausalLM",)

weights = dense.weights


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return dense.megatron_config(hf) | dict(softmax_scale=float(hf["attention_multiplier"]))


def form(hf: dict) -> LayerForm:
    """Return what sets the layers apart from Megatron's."""
    return LayerForm(
        embedding_scale=float(hf["embedding_multiplier"]),
        output_scale=float(hf["residual_multiplier"]),
        logits_scale=1.0 / hf["logits_scaling"],
    )


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "Granite")
    dense.refuse_biases(hf, "Granite", "attention_bias", "mlp_bias")
    for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
        if not hf[key] > 0:
            raise ValueError(f"Granite with {key} {hf[key]} is not supported; it must be positive.")
