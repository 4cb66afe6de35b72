"""SmolLM3 3B: Llama's decoder; every fourth layer does not rotate queries and keys (NoPE)."""

from rl.models import dense

ARCHITECTURES = ("SmolLM3ForCausalLM",)

weights = dense.weights


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return dense.megatron_config(hf) | dict(no_rope_freq=[int(not rotates) for rotates in _rotating(hf)])


def _rotating(hf: dict) -> list[int]:
    """Return 1 for each layer that rotates, 0 for the others."""
    layers, every = hf["num_hidden_layers"], hf.get("no_rope_layer_interval", 4)
    given = hf.get("no_rope_layers")
    return [int((layer + 1) % every != 0) for layer in range(layers)] if given is None else given[:layers]


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "SmolLM3")
    dense.refuse_sliding_window(hf, "SmolLM3")
    dense.refuse_biases(hf, "SmolLM3", "attention_bias", "mlp_bias")
