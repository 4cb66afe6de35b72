"""The safetensors files of a Hugging Face checkpoint: which tensor is where, whether all are there, and parts of them."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl.models.layout import Box, Weight, index

FP8_BLOCK = 128
"""Rows and columns of the blocks that have a factor each, in an FP8 checkpoint."""
MAPPED_BYTES = 256 << 20
"""What is read of a file before it is opened again: pages of a mapped file stay in the memory of the process until then."""


class TensorReader:
    """Parts of a checkpoint's tensors. Holds one file open, and little of it in memory.

    Args:
        files: tensor name -> the file that holds it, as from `tensor_files`.
    """

    def __init__(self, files: dict[str, Path]):
        self.files = files
        self._path: Path | None = None
        self._opened: Any = None
        self._num_bytes = 0

    def read(self, name: str, box: Box) -> Tensor:
        """The box of the tensor, in the dtype of the file."""
        if self._path != self.files[name] or self._num_bytes > MAPPED_BYTES:
            self._path, self._num_bytes = self.files[name], 0
            self._opened = safe_open(self._path, framework="pt")
        part = self._opened.get_slice(name)[index(box)]
        # Whole rows: a cut of columns touches every page of them.
        rows = part.shape[0] if part.dim() else 1
        self._num_bytes += (
            rows * math.prod(self._opened.get_slice(name).get_shape()[1:]) * part.element_size()
        )
        return part


def tensor_files(directory: str, weights: list[Weight]) -> dict[str, Path]:
    """Tensor name -> the file that holds it. Reads headers only.

    Raises ValueError if there are no files, or that lists tensors which are missing or have another shape than config.json
    says; optional weights may be missing.
    """
    files, shapes = {}, {}
    for path in _paths(Path(directory)):
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():
                    if name in files:
                        raise ValueError(
                            f"{path} and {files[name]} both hold {name}; remove the file that is not to be read."
                        )
                    files[name], shapes[name] = path, tuple(opened.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole safetensors file: {error}.") from error
    wanted = {name: shape for weight in weights for name, shape in zip(weight.hf, weight.shapes)}
    may_lack = {name for weight in weights if weight.optional for name in weight.hf} - files.keys()
    wanted = {name: shape for name, shape in wanted.items() if name not in may_lack}
    if missing := [name for name in wanted if name not in files]:
        raise ValueError(f"{directory} lacks {len(missing)} tensors of its architecture: {_few(missing)}.")
    for name, shape in list(wanted.items()):
        if (scale := name + "_scale_inv") in files:
            wanted[scale] = tuple(-(-size // FP8_BLOCK) for size in shape)
    if odd := [
        f"{name} has {shapes[name]}, not {shape}" for name, shape in wanted.items() if shapes[name] != shape
    ]:
        raise ValueError(
            f"{directory} has {len(odd)} tensors of another shape than config.json says: {_few(odd)}."
        )
    return files


def _paths(directory: Path) -> list[Path]:
    """What an index names, else model.safetensors, else every safetensors file. Some published directories hold the weights a
    second time under other names (Mistral's consolidated.safetensors)."""
    index_file, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index_file.exists():
        paths = [
            directory / name
            for name in sorted(set(json.loads(index_file.read_text())["weight_map"].values()))
        ]
    else:
        paths = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ValueError(
            f"model.path={directory} holds no *.safetensors file; Lockstep reads no other format."
        )
    if absent := [path.name for path in paths if not path.exists()]:
        raise ValueError(f"{directory} lacks {_few(absent)}, which its model.safetensors.index.json names.")
    return paths


def refuse_extra(directory: str, names: Iterable[str], weights: list[Weight], hf: dict) -> None:
    """Raise ValueError that lists the tensors of a checkpoint which its architecture has no place for: trained further without
    them it would be another model.

    Not counted: the language model's head where it is not wanted (tied to the embedding, or under a critic), buffers that are
    computed, factors of FP8 blocks, and the layers behind the last that predict further tokens (DeepSeek-V3's MTP).
    """
    wanted = {name for weight in weights for name in weight.hf}
    first, count = hf["num_hidden_layers"], hf.get("num_nextn_predict_layers") or 0
    predicting = tuple(f"model.layers.{layer}." for layer in range(first, first + count))

    def is_known(name: str) -> bool:
        base = name.removesuffix("_scale_inv")
        return (
            base in wanted
            or name == "lm_head.weight"
            or name.endswith(".inv_freq")
            or name.startswith(predicting)
        )

    if extra := [name for name in names if not is_known(name)]:
        raise ValueError(
            f"{directory} has {len(extra)} tensors that {hf['architectures'][0]} knows nothing of: {_few(extra)}."
        )


def _few(items: list[str]) -> str:
    return ", ".join(items[:8]) + (", ..." if len(items) > 8 else "")
