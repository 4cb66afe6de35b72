"""The safetensors files of a Hugging Face checkpoint: find tensors, check them, read parts of them."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl.models.boxes import Box, index
from rl.models.layout import FP8_BLOCK, Weight

MAPPED_BYTES = 256 << 20
"""Bytes read from a file before it is opened again, which releases the pages read so far from memory."""


class TensorReader:
    """Reads parts of a checkpoint's tensors. Keeps one file open and limits its mapped memory.

    Args:
        files: tensor name -> its file, as returned by `tensor_files`.
    """

    def __init__(self, files: dict[str, Path]):
        self.files = files
        self._path: Path | None = None
        self._opened: Any = None
        self._num_bytes = 0

    def read(self, name: str, box: Box) -> Tensor:
        """Return the box of the tensor, in the dtype of the file."""
        if self._path != self.files[name] or self._num_bytes > MAPPED_BYTES:
            self._path, self._num_bytes = self.files[name], 0
            self._opened = safe_open(self._path, framework="pt")
        part = self._opened.get_slice(name)[index(box)]
        # Whole rows are counted: reading some columns maps every page of the rows.
        rows = part.shape[0] if part.dim() else 1
        self._num_bytes += (
            rows * math.prod(self._opened.get_slice(name).get_shape()[1:]) * part.element_size()
        )
        return part


def tensor_files(directory: str, weights: list[Weight]) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name. Reads only headers.

    Raises ValueError if there are no files, or if tensors are missing or differ in shape from config.json.
    Optional weights may be missing.
    """
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _paths(Path(directory)):
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():
                    if name in files:
                        raise ValueError(
                            f"{path} and {files[name]} both hold {name}; remove one of the two files."
                        )
                    files[name], shapes[name] = path, tuple(opened.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or no safetensors file: {error}.") from error
    expected = {
        name: shape
        for weight in weights
        for name, shape in zip(weight.hf, weight.shapes)
        if name in files or not weight.optional
    }
    if missing := [name for name in expected if name not in files]:
        raise ValueError(f"{directory} lacks {len(missing)} tensors of its architecture: {_few(missing)}.")
    for name, shape in list(expected.items()):
        if (scale := name + "_scale_inv") in files:
            expected[scale] = tuple(-(-size // FP8_BLOCK) for size in shape)
    if odd := [
        f"{name} has {shapes[name]}, not {shape}" for name, shape in expected.items() if shapes[name] != shape
    ]:
        raise ValueError(
            f"{directory} has {len(odd)} tensors whose shape differs from config.json: {_few(odd)}."
        )
    return files


def _paths(directory: Path) -> list[Path]:
    """Return the files that an index names, else model.safetensors, else every safetensors file.

    Some published directories hold the weights twice (Mistral's consolidated.safetensors).
    """
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
            f"model.path={directory} holds no *.safetensors file; Lockstep reads no other format, so "
            "convert the model."
        )
    if absent := [path.name for path in paths if not path.exists()]:
        raise ValueError(f"{directory} lacks {_few(absent)}, which its model.safetensors.index.json names.")
    return paths


def refuse_extra(directory: str, names: Iterable[str], weights: list[Weight], hf: dict) -> None:
    """Raise ValueError if the checkpoint has tensors that its architecture lacks.

    Training without these tensors would change the model.

    These tensors are allowed: an unused head (tied to the embedding, or of a language model read as a
    critic), computed buffers, scales of FP8 blocks, and the layers for multi-token prediction after the last
    layer (DeepSeek-V3).
    """
    known = {name for weight in weights for name in weight.hf} | {"lm_head.weight"}
    first, count = hf["num_hidden_layers"], hf.get("num_nextn_predict_layers") or 0
    predicting = tuple(f"model.layers.{layer}." for layer in range(first, first + count))
    extra = [
        name
        for name in names
        if name.removesuffix("_scale_inv") not in known
        and not name.endswith(".inv_freq")
        and not name.startswith(predicting)
    ]
    if extra:
        raise ValueError(
            f"{directory} has {len(extra)} tensors that {hf['architectures'][0]} does not have: "
            f"{_few(extra)}."
        )


def _few(items: list[str]) -> str:
    return ", ".join(items[:8]) + (", ..." if len(items) > 8 else "")
