"""Granite 4, dense: Granite 3 in the class of Granite's hybrid models, with gate and up in one tensor."""

from dataclasses import replace

from rl.models import dense, granite
from rl.models.layout import Weight, joined

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)

megatron_config, form = granite.megatron_config, granite.form


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    kinds = set(hf.get("layer_types") or ["linear_attention"])
    if others := kinds - {"attention", "full_attention"}:  # the published files have the first name
        raise ValueError(
            f"Granite 4 with layers of type {', '.join(sorted(others))} is not supported: Mamba layers are "
            "not built; use a dense model (granite-4.0-micro, -1b, -350m)."
        )
    if hf.get("num_local_experts"):
        raise ValueError(
            f"Granite 4 with num_local_experts {hf['num_local_experts']} is not supported; only 0 is."
        )
    if hf.get("position_embedding_type") != "rope":
        raise ValueError(
            f"Granite 4 with position_embedding_type {hf.get('position_embedding_type')} is not supported; "
            "only rope is."
        )
    granite.check(hf)


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass."""
    return [_in_shared_mlp(weight) if ".mlp." in weight.megatron else weight for weight in dense.weights(hf)]


def _in_shared_mlp(weight: Weight) -> Weight:
    """Return a weight of the MLP under its names in the checkpoint, gate and up as one tensor [2F, H]."""
    name = weight.hf[0].replace(".mlp.down_proj.", ".shared_mlp.output_linear.")
    if len(weight.hf) == 1:
        return replace(weight, hf=(name,), vllm=name)
    name = name.replace(".mlp.gate_proj.", ".shared_mlp.input_linear.")
    rows, columns = tuple(shape[0] for shape in weight.shapes), weight.shapes[0][1:]
    cut = joined(weight.cut, rows)
    return replace(weight, hf=(name,), vllm=name, shapes=((sum(rows), *columns),), cut=cut)
