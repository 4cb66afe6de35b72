"""Adapters in the files of the package peft: adapter_config.json and adapter_model.safetensors.

Every linear layer of the checkpoint has its own A and B in the file, including single experts. peft converts
experts to the fused parameters of transformers 5 when it loads them
(peft/utils/transformers_weight_conversion.py of peft 0.21). Plain data, as `rl.models.layout`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rl.models.adapters import PREFIX, LowRank, adapters
from rl.models.files import tensor_files
from rl.models.json_files import read_object
from rl.models.layout import TOWER, Weight
from rl.models.placement import count_experts

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
FUSED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Last parts of layers' names. In a mixture of experts, peft takes every layer with such a name for an
expert's layer."""
READABLE: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
"""Key of adapter_config.json -> the values with which an adapter is B A with one rank and one scale, relative
to the model's own weights. Other keys are not read: dropout, for example, matters only in training."""


def peft_config(
    pairs: Sequence[LowRank], weights: Sequence[Weight], *, rank: int, scale: float, source: str
) -> dict:
    """Return the content of adapter_config.json.

    pairs: the adapters. weights: all weights of the model. scale: factor of B A. source: path of the model.

    In a mixture of experts peft moves every target called gate_proj, up_proj or down_proj to the experts.
    Layers of these names outside of the experts are therefore given as target_parameters. peft also doubles
    rank and alpha of the fused gate and up. This preserves alpha / rank, but not rslora's alpha / sqrt(rank).
    The file therefore states the scale as alpha / rank, also for rslora.
    """
    adapted, layers = {pair.module for pair in pairs}, defaultdict(list)
    experts = {pair.module for pair in pairs if pair.base.expert is not None}
    for pair in adapters(weights, rank=1):
        layers[pair.module.rpartition(".")[2]].append(pair.module)
    modules: list[str] = []
    parameters: list[str] = []
    for last, names in layers.items():
        if count_experts(list(weights)) and last in FUSED:
            modules += [last] if experts.intersection(names) else []
            parameters += [f"{name}.weight" for name in names if name in adapted - experts]
        else:
            modules += [last] if adapted.issuperset(names) else [name for name in names if name in adapted]
    alpha, sees = rank * scale, any(weight.megatron.startswith(TOWER) for weight in weights)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": rank,
        "lora_alpha": round(alpha) if math.isclose(alpha, round(alpha)) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "target_parameters": parameters or None,
        # Layers of a vision tower have no adapters, but some have names of the text model's layers.
        "exclude_modules": rf".*{re.escape(TOWER)}.*" if sees else None,
        "use_rslora": False,
        "use_dora": any(pair.magnitude is not None for pair in pairs),
        "init_lora_weights": True,
        "inference_mode": True,
    }


def check_peft(directory: str, pairs: Sequence[LowRank], *, kind: str, rank: int, scale: float) -> None:
    """Raise ValueError unless the directory holds exactly these adapters, of this kind, rank and scale.

    kind: `adapter.kind`. scale: factor of B A.
    """
    file = Path(directory, CONFIG)
    if not file.is_file() or not Path(directory, TENSORS).is_file():
        raise ValueError(f"adapter.path={directory} is not a directory with {CONFIG} and {TENSORS}.")
    found = read_object(file)
    for key, values in READABLE.items():
        if key in found and found[key] not in values:
            raise ValueError(
                f"adapter.path: {file} has {key}={found[key]}, but only an adapter with {key}={values[0]} is "
                "a product B A that is added to the weights of model.path; merge it with peft's "
                "merge_and_unload, save the model and name it in model.path."
            )
    own_rank, is_dora = found.get("r"), bool(found.get("use_dora"))
    if own_rank != rank:
        raise ValueError(f"adapter.rank={rank}, but {file} has r={own_rank}; set adapter.rank={own_rank}.")
    divisor = math.sqrt(rank) if found.get("use_rslora") else rank
    own_scale = (found.get("lora_alpha") or 0) / divisor
    if is_dora != (kind == "dora"):
        right = "dora" if is_dora else "lora"
        raise ValueError(
            f"adapter.kind={kind}, but {file} has use_dora={str(is_dora).lower()}; set adapter.kind={right}."
        )
    if not math.isclose(own_scale, scale, rel_tol=1e-6):
        alpha = own_scale * (math.sqrt(rank) if kind == "rslora" else rank)
        raise ValueError(
            f"adapter.alpha gives B A the factor {scale:g}, but {file} has {own_scale:g} (lora_alpha="
            f"{found.get('lora_alpha')}, r={own_rank}, use_rslora={bool(found.get('use_rslora'))}); with "
            f"adapter.kind={kind} set adapter.alpha={alpha:g}."
        )
    _check_tensors(directory, pairs)


def _check_tensors(directory: str, pairs: Sequence[LowRank]) -> None:
    """Raise ValueError unless the file has exactly the tensors of the adapters."""
    weights = [weight for pair in pairs for weight in pair.weights]
    names = set(tensor_files(directory, []))
    expected = {name for weight in weights for name in weight.hf}
    if fused := sorted(name for name in names if ".experts.lora_" in name or ".experts.base_layer." in name):
        raise ValueError(
            f"adapter.path={directory} holds the experts' adapters fused ({fused[0]}), as peft saves them "
            "with transformers 5; Lockstep reads one adapter per expert. Merge it with peft's "
            "merge_and_unload, save the model and name it in model.path."
        )
    for what, some in (("lacks", expected - names), ("also has", names - expected)):
        if some:
            layers = sorted({_layer(name).rpartition(".")[2] for name in names})
            raise ValueError(
                f"adapter.path={directory} {what} {len(some)} tensors of the layers in adapter.targets, such "
                f"as {min(some)}; its adapters are of {', '.join(layers)}: set adapter.targets to its layers."
            )
    tensor_files(directory, weights)  # compares the shapes


def _layer(name: str) -> str:
    """Return the layer to which a tensor of an adapter belongs."""
    return name.removeprefix(PREFIX).partition(".lora_")[0]
