"""The safetensors files of a Hugging Face checkpoint: find tensors, check them, read parts of them."""

import logging
import math
import os
import stat
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl.models.boxes import Box, index
from rl.models.json_files import INDEX, read_object, refuse_pointer
from rl.models.layout import FP8_BLOCK, Stored, Weight
from rl.models.rope import frequencies
from rl.models.sizes import PREDICTING, is_tied

log = logging.getLogger(__name__)

MAPPED_BYTES = 256 << 20
"""Bytes read from a file before it is opened again, which releases the pages read so far from memory."""

MXFP4_BLOCK = 32
"""Number of values that share a power of two in MXFP4."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of an MXFP4 tensor's codes and exponents."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights in files, except quantised weights."""
QUANTISATIONS = ("fp8", "mxfp4")
"""Readable values of `quantization_config.quant_method`."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; codes 8 to 15 are their negatives, for example code 9 is -0.5."""


def mxfp4(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return the values float32 [..., blocks x 32] of an MXFP4 tensor (OCP Microscaling Formats, 1.0).

    codes: uint8 [..., blocks, 16]; each byte holds two codes, the first one in the lower four bits.
    exponents: uint8 [..., blocks], the exponent of each block's power of two, plus 127.
    """
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return torch.ldexp(table[pairs.int()], exponents[..., None].int() - 127).flatten(-2)


class TensorReader:
    """Reads parts of a checkpoint's tensors. Keeps one file open and limits its mapped memory.

    Args:
        files: tensor name -> its file, as returned by `tensor_files`.
        weights: weights that the files may hold as parts of other tensors.
    """

    def __init__(self, files: dict[str, Path], weights: Iterable[Weight] = ()):
        self.files = files
        parts = [(weight, weight.stored) for weight in weights if weight.stored is not None]
        self._stored = {weight.hf[0]: stored for weight, stored in parts}
        self._shapes = {stored.name: stored.shape(weight.shapes[0]) for weight, stored in parts}
        """Shapes of the tensors that hold all experts, in the published files."""
        self._path: Path | None = None
        self._opened: Any = None
        self._num_bytes = 0

    def read(self, name: str, box: Box) -> Tensor:
        """Return the box of the tensor, in the dtype of the file; MXFP4 is dequantised to float32.

        An empty box is the whole tensor.
        """
        stored = self._stored.get(name)
        if stored is None:
            return self._read(name, box)
        if stored.name in self.files:
            own = self._as_held(stored)
            part = self._read(stored.name, own.box(box))[0]
            return part.t() if own.transposed else part
        rows, (first, last) = box
        expert = (stored.index, stored.index + 1)
        blocks = expert, rows, (first // MXFP4_BLOCK, -(-last // MXFP4_BLOCK))
        codes = self._read(stored.name + BLOCKS, (*blocks, (0, MXFP4_BLOCK // 2)))[0]
        values = mxfp4(codes, self._read(stored.name + SCALES, blocks)[0])
        return values.narrow(-1, first % MXFP4_BLOCK, last - first)

    def _as_held(self, stored: Stored) -> Stored:
        """Return the place with the order of rows and columns in these files (`_swapped`)."""
        self._open(stored.name)
        held = tuple(self._opened.get_slice(stored.name).get_shape())
        same = held == self._shapes[stored.name]
        return stored if same else replace(stored, transposed=not stored.transposed)

    def _read(self, name: str, box: Box) -> Tensor:
        self._open(name)
        part = self._opened.get_slice(name)[index(box)]
        # Whole rows are counted: reading some columns maps every page of the rows.
        rows = part.shape[0] if part.dim() else 1
        self._num_bytes += (
            rows * math.prod(self._opened.get_slice(name).get_shape()[1:]) * part.element_size()
        )
        return part

    def _open(self, name: str) -> None:
        if self._path != self.files[name] or self._num_bytes > MAPPED_BYTES:
            self._path, self._num_bytes = self.files[name], 0
            self._opened = safe_open(self._path, framework="pt")


def tensor_files(directory: str, weights: list[Weight]) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name. Reads only headers.

    Raises ValueError if there are no files. Raises it also for a tensor that is missing, differs in shape
    from config.json, has a dtype that cannot be read, or is not where the index says. Optional weights may be
    missing.
    """
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    paths, places = _paths(Path(directory))
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not a file; put the model's file there.")
        refuse_pointer(path)
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():
                    if name in files:
                        raise ValueError(
                            f"{path} and {files[name]} both hold {name}; remove one of the two files."
                        )
                    part = opened.get_slice(name)
                    files[name], shapes[name], dtypes[name] = path, tuple(part.get_shape()), part.get_dtype()
        except FileNotFoundError as error:  # the library raises it also for a file without permission
            owner, mode = path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)
            raise ValueError(
                f"{path} cannot be read: it has owner={owner} and mode={mode:04o}; its owner can chmod it."
            ) from error
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or no safetensors file: {error}; copy it again.") from error
    if lost := [name for name, path in places.items() if files.get(name) != path]:
        raise ValueError(
            f"{Path(directory, INDEX)} places {_few(lost)} in files that do not hold them; copy the index "
            "and its files again."
        )
    expected = {
        name: shape
        for weight in weights
        for name, shape in stored_shapes(weight, files).items()
        if name in files or not weight.optional
    }
    if missing := [name for name in expected if name not in files]:
        raise ValueError(
            f"{directory} lacks {len(missing)} tensors of its architecture: {_few(missing)}; copy the "
            "model again."
        )
    for name, shape in list(expected.items()):
        if (scale := name + "_scale_inv") in files:
            expected[scale] = tuple(-(-size // FP8_BLOCK) for size in shape)
    parts = [weight for weight in weights if weight.stored is not None]
    of_experts = {weight.stored.name for weight in parts if weight.stored is not None}
    if odd := [
        f"{name} has {shapes[name]}, not {shape}"
        for name, shape in expected.items()
        if shapes[name] not in (shape, _swapped(shape) if name in of_experts else shape)
    ]:
        raise ValueError(
            f"{directory} has {len(odd)} tensors whose shape differs from config.json: {_few(odd)}; copy "
            "the model again."
        )
    _check_dtypes(files, {name: dtypes[name] for name in expected})
    return files | {weight.hf[0]: files[next(iter(stored_shapes(weight, files)))] for weight in parts}


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor of all experts with rows and columns of each expert exchanged.

    transformers 5 exchanges rows and columns when it loads some models, and does not exchange them back when
    it saves these models.
    """
    return (*shape[:-2], *shape[:-3:-1]) if len(shape) == 3 else shape


def stored_shapes(weight: Weight, names: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the files' tensors that hold the weight, by name.

    names: names of the tensors in the files; they show whether the files are MXFP4.
    """
    if weight.stored is None:
        return dict(zip(weight.hf, weight.shapes))
    (shape,), name = weight.shapes, weight.stored.name
    if name in names or name + BLOCKS not in names:
        return {name: weight.stored.shape(shape)}
    blocks = (weight.stored.count, *shape[:-1], shape[-1] // MXFP4_BLOCK)
    return {name + BLOCKS: (*blocks, MXFP4_BLOCK // 2), name + SCALES: blocks}


def as_stored(
    weights: Iterable[Weight], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) as the files hold them.

    tensors: (name, tensor) of every tensor of `weights`, in the order of `weights`.
    """
    places = {weight.hf[0]: weight.stored for weight in weights if weight.stored is not None}
    parts: list[Tensor] = []
    for name, tensor in tensors:
        if (place := places.get(name)) is None:
            yield name, tensor
            continue
        assert place.index == len(parts), f"{name} comes before other experts' tensors of {place.name}"
        parts.append(tensor.t() if place.transposed else tensor)
        if len(parts) == place.count:
            yield place.name, torch.stack(parts)
            parts = []


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the mode of the user's umask; the library gives it 0600."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def _check_dtypes(files: dict[str, Path], dtypes: dict[str, str]) -> None:
    """Raise ValueError for a tensor with a dtype that is not readable as a weight."""
    for name, dtype in dtypes.items():
        if name.endswith((BLOCKS, SCALES)):
            readable: tuple[str, ...] = ("U8",)
        else:
            readable = ("F8_E4M3",) if name + "_scale_inv" in dtypes else FLOATS
        if dtype not in readable:
            raise ValueError(
                f"{files[name]} has {name} in {dtype}, not {' or '.join(readable)}; Lockstep reads floats, "
                "MXFP4, and F8_E4M3 with one scale per block: use the model in one of these formats."
            )


def _paths(directory: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files that an index names, else model.safetensors, else every safetensors file.

    Some published directories hold the weights twice (Mistral's consolidated.safetensors). The second value
    is the file of each tensor, by the tensor's name, according to the index.
    """
    index_file, single = directory / INDEX, directory / "model.safetensors"
    places: dict[str, Path] = {}
    if os.path.lexists(index_file):
        named = read_object(index_file).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise ValueError(f"{index_file} has no weight_map from tensors to files; copy it again.")
        for name, file in named.items():
            if not isinstance(file, str) or Path(file).name != file or not file:
                raise ValueError(f"{index_file}: weight_map.{name}={file!r} must be a file beside the index.")
            places[name] = directory / file
        paths = sorted(set(places.values()))
        if single.exists() and single not in paths:
            raise ValueError(
                f"{directory} has {single.name} beside {INDEX}, which names other files: transformers reads "
                "the first file, vLLM the others; remove the old files."
            )
    else:
        paths = [single] if os.path.lexists(single) else sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ValueError(
            f"model.path={directory} holds no *.safetensors file; Lockstep reads no other format, so "
            "convert the model."
        )
    if absent := [path.name for path in paths if not path.exists()]:
        raise ValueError(
            f"{directory} lacks {_few(absent)}, which {INDEX} names or a link points to; copy the model "
            "again."
        )
    return paths, places


def refuse_extra(directory: str, files: dict[str, Path], weights: list[Weight], hf: dict) -> None:
    """Raise ValueError if the checkpoint has tensors that its architecture lacks or that contradict others.

    Training without these tensors would change the model. files: see `tensor_files`.

    Allowed are an unused head, computed frequencies, scales of FP8 blocks, and layers for multi-token
    prediction. An unused head is tied and equal to the embedding, or belongs to a language model that is read
    as a critic. Layers for multi-token prediction are after the last layer (DeepSeek-V3) or are named mtp
    (Qwen3-Next); the log names them.
    """
    found = set(files)
    known = {name for weight in weights for name in weight.hf}
    known |= {name for weight in weights for name in stored_shapes(weight, found)}
    first, count = hf["num_hidden_layers"], max(hf.get(key) or 0 for key in PREDICTING)
    predicting = ("mtp.", *(f"model.layers.{layer}." for layer in range(first, first + count)))
    others = sorted(found - known - {name + "_scale_inv" for name in known})
    unread = [name for name in others if name.startswith(predicting)]
    extra = [name for name in others if name not in (*unread, "lm_head.weight") and not _is_frequency(name)]
    if extra:
        raise ValueError(
            f"{directory} has {len(extra)} tensors that {hf['architectures'][0]} does not have: "
            f"{_few(extra)}."
        )
    if unread:
        log.warning(
            "%s: %d tensors for multi-token prediction are not read, and exports lack them: %s",
            directory,
            len(unread),
            _few(unread),
        )
    reader = TensorReader(files, weights)
    embedding = next((weight for weight in weights if weight.tied_to_head), None)
    if "lm_head.weight" in others and is_tied(hf) and embedding is not None:
        _compare_head(reader, embedding)
    for name in filter(_is_frequency, others):
        own, local = frequencies(hf), reader.read(name, ()).float()
        if "visual" not in name and (own.shape != local.shape or not torch.allclose(own, local, rtol=0.01)):
            raise ValueError(
                f"{files[name]} has {name}, which differ from the rotary frequencies of "
                "config.json (rope_theta, rope_scaling); correct config.json."
            )


def _is_frequency(name: str) -> bool:
    return name.endswith(".inv_freq")


def _compare_head(reader: TensorReader, embedding: Weight) -> None:
    """Raise ValueError if the files hold a head that differs from the embedding to which it is tied."""
    (name,), ((rows, columns),) = embedding.hf, embedding.shapes
    size = max(1, MAPPED_BYTES // (8 * columns))
    for start in range(0, rows, size):
        box = (start, min(start + size, rows)), (0, columns)
        head, tied = reader.read("lm_head.weight", box), reader.read(name, box)
        if head.shape != tied.shape or not torch.equal(head.to(tied.dtype), tied):
            raise ValueError(
                f"{reader.files['lm_head.weight']} has an lm_head.weight that differs from {name}, but "
                "config.json has tie_word_embeddings=true; set it to false, or remove the tensor."
            )


def check_quantisation(directory: str, hf: dict, files: dict[str, Path]) -> None:
    """Raise ValueError if config.json has a quantization_config that the tensors contradict."""
    config = hf.get("quantization_config") or {}
    kind = config.get("quant_method")
    if not config:
        return
    if kind not in QUANTISATIONS:
        raise ValueError(
            f"{directory}/config.json has quantization_config.quant_method={kind}; only "
            f"{' and '.join(QUANTISATIONS)} can be read; use the model in another format."
        )
    if not any(name.endswith(("_scale_inv", SCALES)) for name in files):
        raise ValueError(
            f"{directory}/config.json has a quantization_config (quant_method={kind}), but no tensor is "
            "quantised; remove the key, or use the quantised files."
        )


def _few(items: list[str]) -> str:
    return ", ".join(items[:8]) + (", ..." if len(items) > 8 else "")
