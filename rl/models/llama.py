"""Llama 2 and 3.x: dense decoder without biases.

Llama 3.1 and later scale the low rotary frequencies (`rope_type: llama3`). The small models of 3.2 have a
tied embedding.
"""

from rl.models import dense

ARCHITECTURES = ("LlamaForCausalLM",)

megatron_config, weights = dense.megatron_config, dense.weights


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "Llama")
    dense.refuse_biases(hf, "Llama", "attention_bias", "mlp_bias")
