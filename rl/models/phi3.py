"""Phi-4 and Phi-3: Llama's decoder; checkpoints join query, key and value, and gate and up."""

from dataclasses import replace

from rl.models import dense
from rl.models.layout import Weight, joined

ARCHITECTURES = ("Phi3ForCausalLM",)

megatron_config = dense.megatron_config


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "Phi-4", rope_kinds=("default",))
    dense.refuse_biases(hf, "Phi-4", "attention_bias", "mlp_bias")
    if hf.get("sliding_window"):
        raise ValueError(
            f"Phi-4 with sliding_window {hf['sliding_window']} is not supported; set it to null if no "
            "sequence exceeds the window."
        )


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass."""
    return [_joined(weight) for weight in dense.weights(hf)]


def _joined(weight: Weight) -> Weight:
    """Return the weight as one tensor of the checkpoint."""
    if len(weight.hf) == 1:
        return weight
    name = weight.hf[0].replace(".q_proj.", ".qkv_proj.").replace(".gate_proj.", ".gate_up_proj.")
    rows, columns = tuple(shape[0] for shape in weight.shapes), weight.shapes[0][1:]
    return replace(weight, hf=(name,), shapes=((sum(rows), *columns),), cut=joined(weight.cut, rows))
