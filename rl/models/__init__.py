"""One file per architecture: Hugging Face config -> Megatron config, and the names and layouts of every weight."""

import json
from pathlib import Path
from types import ModuleType

from rl.models import deepseek, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from rl.models.layout import REPLICATED, Weight

_FILES = (qwen2, qwen3, llama, mistral, qwen3_moe, mixtral, deepseek)
SUPPORTED = tuple(name for file in _FILES for name in file.ARCHITECTURES)
"""Architectures as config.json names them."""


def value_model(hf: dict) -> dict:
    """The config as one of a language model with a value head in the place of its own: a critic or a reward model.

    `hf` may be a causal language model's or that of a sequence classifier with one label. ValueError for another.
    """
    name = (hf.get("architectures") or [""])[0]
    causal = name.replace("ForSequenceClassification", "ForCausalLM")
    labels = hf.get("num_labels") or len(hf.get("id2label") or {}) or (2 if causal != name else 1)
    if causal != name and labels != 1:
        raise ValueError(f"{name} with {labels} labels is no reward model; it must have num_labels 1.")
    return hf | {"architectures": [causal], "tie_word_embeddings": False}


def value_weights(hf: dict, *, needs_head: bool) -> list[Weight]:
    """Weights of a `value_model`: the language model's without its head, and the value head, which a checkpoint may lack
    unless `needs_head`: a critic then begins at 0."""
    body = [weight for weight in architecture(hf).weights(hf) if "lm_head.weight" not in weight.hf]
    shape = (1, hf["hidden_size"])
    return [
        *body,
        Weight(
            ("score.weight",),
            (shape,),
            "value_head.weight",
            "score.weight",
            REPLICATED,
            optional=not needs_head,
        ),
    ]


def architecture(hf: dict) -> ModuleType:
    """The file that describes the model of this Hugging Face config."""
    name = hf["architectures"][0]
    for file in _FILES:
        if name in file.ARCHITECTURES:
            return file
    raise ValueError(f"architecture {name} is not supported; supported are {', '.join(SUPPORTED)}.")


def read_hf_config(directory: str, *, key: str = "model.path") -> dict:
    """config.json of the Hugging Face checkpoint directory that the config's `key` names. ValueError if there is none."""
    path = Path(directory, "config.json")
    if not path.parent.is_dir():
        raise ValueError(
            f"{key}={directory} is not a directory; it must be a Hugging Face checkpoint directory."
        )
    if not path.is_file():
        raise ValueError(
            f"{key}={directory} has no config.json; it must be a Hugging Face checkpoint directory."
        )
    return json.loads(path.read_text())
