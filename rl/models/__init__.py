"""One file per architecture: Hugging Face config -> Megatron config, and the names and layouts of every weight."""

import json
from pathlib import Path
from types import ModuleType

from rl.models import qwen2

_FILES = (qwen2,)
SUPPORTED = tuple(name for file in _FILES for name in file.ARCHITECTURES)
"""Architectures as config.json names them."""


def architecture(hf: dict) -> ModuleType:
    """The file that describes the model of this Hugging Face config."""
    name = hf["architectures"][0]
    for file in _FILES:
        if name in file.ARCHITECTURES:
            return file
    raise ValueError(f"architecture {name} is not supported; supported are {', '.join(SUPPORTED)}.")


def read_hf_config(directory: str) -> dict:
    """config.json of a Hugging Face checkpoint directory. ValueError if there is none."""
    path = Path(directory, "config.json")
    if not path.parent.is_dir():
        raise ValueError(f"model.path={directory} is not a directory; it must be a Hugging Face checkpoint directory.")
    if not path.is_file():
        raise ValueError(f"model.path={directory} has no config.json; it must be a Hugging Face checkpoint directory.")
    return json.loads(path.read_text())
