"""Mistral 7B v0.2 and later, Nemo, Small and Large: Llama's decoder without a sliding window.

Some have a head_dim other than hidden / heads.
"""

from rl.models import dense

ARCHITECTURES = ("MistralForCausalLM",)

megatron_config, weights = dense.megatron_config, dense.weights


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "Mistral")
    window = hf.get("sliding_window", 4096)  # transformers' default where the key is absent
    if window is not None:
        raise ValueError(
            f"Mistral with sliding_window {window} is not supported; set it to null in config.json if no "
            "sequence exceeds the window."
        )
