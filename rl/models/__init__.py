"""Model architectures, one file each, and the functions that select the file for a config.

Each file defines `ARCHITECTURES` (names in config.json), `check`, `megatron_config` and `weights` (names and
layouts of all weights), and `form` if its layers are not all Megatron's. `_FILES` lists the files;
docs/extending.md has a worked example.
"""

import importlib
import json
import os
from pathlib import Path
from types import ModuleType

from rl.models import (
    by_class,
    deepseek,
    gemma3,
    glm4_moe,
    gpt_oss,
    granite,
    granite4,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from rl.models.json_files import read_object, similar_beside
from rl.models.layer_form import LayerForm
from rl.models.layout import REPLICATED, VOCAB, Weight

_WITH_BITWISE = (qwen2, qwen3, llama, mistral, qwen3_moe, mixtral, deepseek, glm4_moe)
_OTHERS = (seed_oss, smollm3, granite, granite4, gemma3, phi3, gpt_oss, minimax_m2, qwen3_next, qwen3_5)
_FILES = (*_WITH_BITWISE, *_OTHERS)
VISION = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_vl",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_vl",
}
"""Architectures with a vision tower -> their file, which only a run with such a model imports."""
SUPPORTED = (*(name for file in _FILES for name in file.ARCHITECTURES), *VISION)
"""Architectures by their name in config.json."""
BITWISE = tuple(name for file in _WITH_BITWISE for name in file.ARCHITECTURES)
"""Architectures that model.numerics=bitwise supports."""


def value_model(hf: dict) -> dict:
    """Return the config of the same model with a value head: a critic or a reward model.

    hf: the config of a causal language model or of a sequence classifier with one label. Raises ValueError
    for a classifier with several labels.
    """
    name = (hf.get("architectures") or [""])[0]
    causal = name.replace("ForSequenceClassification", "ForCausalLM")
    labels = hf.get("num_labels") or len(hf.get("id2label") or {}) or (2 if causal != name else 1)
    if causal != name and labels != 1:
        raise ValueError(f"{name} with {labels} labels is no reward model; it must have num_labels 1.")
    return hf | {"architectures": [causal], "tie_word_embeddings": False}


def value_weights(hf: dict, *, needs_head: bool) -> list[Weight]:
    """Return the weights of a `value_model`: the language model's weights except its head, and a value head.

    Unless `needs_head`, a checkpoint may lack the value head, which then starts at 0.
    """
    body = [w for w in architecture(hf).weights(hf) if w.cut is not VOCAB or w.first_stage]
    name, shape = "score.weight", (1, hf["hidden_size"])
    cut = by_class.ROWS if hf.get(by_class.MARK) else REPLICATED
    head = Weight((name,), (shape,), "value_head.weight", name, cut, optional=not needs_head)
    return [*body, head]


def architecture(hf: dict) -> ModuleType:
    """Return the module that describes the model of this Hugging Face config.

    Raises ValueError for an unsupported architecture.
    """
    if hf.get(by_class.MARK):
        return by_class
    name = hf["architectures"][0]
    if name in VISION:
        return importlib.import_module(f"rl.models.{VISION[name]}")
    for file in _FILES:
        if name in file.ARCHITECTURES:
            return file
    raise ValueError(f"architecture {name} is not supported; supported are {', '.join(SUPPORTED)}.")


def check_options(hf: dict) -> None:
    """Raise ValueError for options of a model that are not supported, and that its class may support."""
    file = architecture(hf)
    try:
        file.check(hf)
    except ValueError as error:
        if file is by_class or by_class.objection(hf):
            raise
        raise ValueError(f"{error} Or train its class: training.backend=transformers.") from error


def trains_class(backend: str, path: str) -> bool:
    """Return whether the model trains as its class in transformers. backend: `training.backend`."""
    if backend != "auto":
        return backend == "transformers"
    try:
        hf = json.loads(Path(path, "config.json").read_text())
        names = set(hf.get("architectures") or ())
    except (OSError, ValueError, TypeError, AttributeError):
        return False  # the inputs say what is wrong
    return bool(names) and names.isdisjoint(SUPPORTED) and not by_class.objection(hf)


def form(hf: dict) -> LayerForm:
    """Return how the layers of this model differ from Megatron's."""
    of_model = vars(architecture(hf)).get("form")
    return of_model(hf) if of_model else LayerForm()


def read_hf_config(directory: str, *, key: str = "model.path") -> dict:
    """Return config.json of a Hugging Face checkpoint directory, `merged`.

    key: config key that the message names. Raises ValueError if the file is missing, or as `read_object`.
    """
    path = Path(directory, "config.json")
    if not os.path.lexists(path):
        if path.parent.is_dir():
            raise ValueError(
                f"{key}={directory} has no config.json; it must be a Hugging Face checkpoint directory."
            )
        if path.parent.is_file():
            raise ValueError(
                f"{key}={directory} is a file, but must be the directory of a Hugging Face checkpoint (for a "
                "GGUF file, lockstep model --gguf FILE --out DIR makes one)."
            )
        meant = similar_beside(path.parent, lambda entry: (entry / "config.json").is_file())
        raise ValueError(
            f"{key}={directory} is not a directory; {meant}download the checkpoint first "
            f"(hf download {directory if directory.count('/') == 1 else 'NAME'} --local-dir DIR) and set "
            f"{key}=DIR."
        )
    return merged(read_object(path))


def merged(written: dict) -> dict:
    """Return a config.json whose top has all keys of the language model; `as_written` undoes it.

    For example, a model with a vision tower has `hidden_size` in `text_config`; it is copied to the top.
    """
    if "vision_config" not in written:
        return written
    return {**written.get("text_config", {}), **written, "as_written": written}


def as_written(hf: dict) -> dict:
    """Return the content of the file from which `merged` made `hf`."""
    return hf.get("as_written", hf)
