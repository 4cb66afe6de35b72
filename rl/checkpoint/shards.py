"""The file of one rank: boxes of tensors in the safetensors format, with a checksum.

A tensor of the file has a name such as `policy/exp_avg/model.norm.weight[0:64]`: the model, the weight or
optimizer state, the Hugging Face tensor and the box. Nothing is pickled; any safetensors reader opens the
file. Unlike the safetensors library, the writer makes no second copy, computes the checksum while it writes,
and lets other threads run.
"""

import ctypes
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rl.models.boxes import Box, extent, index, overlap, relative, volume

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
BUFFER_BYTES = 8 << 20
"""Size of one write and one read, in bytes."""


@dataclass(frozen=True)
class Shard:
    """A box of the tensor `name`, with its elements on any device."""

    name: str
    box: Box
    tensor: Tensor

    @property
    def key(self) -> str:
        return f"{self.name}[{','.join(f'{start}:{stop}' for start, stop in self.box)}]"


@dataclass(frozen=True)
class Written:
    """Size and CRC-32 of a file as written. CRC-32 detects accidents, not forgeries."""

    bytes: int
    crc32: int


class DamagedError(Exception):
    """A file of a checkpoint differs from what was written; the message names it."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise DamagedError for any error in the block, which reads the file.

    A missing permission is the exception: it stays a PermissionError.
    """
    try:
        yield
    except DamagedError:
        raise
    except PermissionError as error:  # the checkpoint may be intact, so the run must not use an older one
        raise PermissionError(f"{path} cannot be read: {error.strerror}; correct its permissions.") from error
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # of any type, such as RecursionError for a million brackets
        raise DamagedError(f"{path} is damaged: {type(error).__name__}: {str(error)[:200]}") from error


def in_file_order(shards: Iterable[Shard]) -> list[Shard]:
    """Return the shards sorted by the size of their elements, largest first.

    Each tensor of the file then begins at a multiple of the size of its elements.
    """
    return sorted(shards, key=lambda shard: -shard.tensor.itemsize)


def num_bytes(shards: Iterable[Shard]) -> int:
    return sum(shard.tensor.nbytes for shard in shards)


def write_shards(path: Path, shards: Sequence[Shard], copies: Iterable[Shard] | None = None) -> Written:
    """Write shards, sorted by `in_file_order`, and sync the file. Raises OSError. Not collective.

    copies: the shards in host memory, in the same order; the default is to copy each before it is written.
    """
    header, at = {}, 0
    for shard in shards:
        size = shard.tensor.nbytes
        shape, offsets = list(extent(shard.box)), [at, at + size]
        header[shard.key] = dict(dtype=DTYPES[shard.tensor.dtype], shape=shape, data_offsets=offsets)
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=BUFFER_BYTES) as file:
        start = len(text).to_bytes(8, "little") + text
        crc = zlib.crc32(start)
        file.write(start)
        for shard in shards if copies is None else copies:
            if not shard.tensor.nbytes:
                continue  # zlib begins a new checksum if it is given a null pointer
            tensor = shard.tensor.detach().cpu().contiguous()
            # Not numpy(): afterwards torch refuses to resize the storage, which rl.training.offload does.
            part = memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
            crc = zlib.crc32(part, crc)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return Written(8 + len(text) + at, crc)


def check_file(path: Path, expected: Written, *, contents: bool) -> None:
    """Raise DamagedError if the file's size differs from what was written. Not collective.

    contents: also compare the checksum. The header of a file with tensors is always read.
    """
    with reading(path):
        size = path.stat().st_size
        if size != expected.bytes:
            raise DamagedError(f"{path} has {size} bytes, but {expected.bytes} were written")
        if path.suffix == ".safetensors":
            read_index(path.parent, [path.name])
        if not contents:
            return
        crc = 0
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(BUFFER_BYTES):
                crc = zlib.crc32(chunk, crc)
    if crc != expected.crc32:
        raise DamagedError(
            f"{path} is damaged: its checksum is {crc:08x}, but {expected.crc32:08x} was written"
        )


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor, and the file and the key that hold it."""

    box: Box
    file: str
    key: str


ShardIndex = dict[str, list[StoredBox]]
"""Boxes by the tensor's name."""


def read_index(directory: Path, files: Iterable[str]) -> ShardIndex:
    """Return the boxes that the files hold, reading only the headers. Not collective."""
    index_of: ShardIndex = {}
    for file in files:
        with open(directory / file, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for key in header:
            name, box = _parse(key)
            index_of.setdefault(name, []).append(StoredBox(box, file, key))
    return index_of


def _parse(key: str) -> tuple[str, Box]:
    match = re.fullmatch(r"(.+)\[([\d:,]*)\]", key)
    assert match, key
    bounds = (part.split(":") for part in match[2].split(","))
    return match[1], tuple((int(start), int(stop)) for start, stop in bounds)


class ShardReader:
    """Reads any box of a checkpoint's tensors, and only the bytes that it needs."""

    def __init__(self, directory: Path, index_of: ShardIndex):
        self.directory, self.index_of = directory, index_of
        self._open: dict[str, Any] = {}

    def fill(self, name: str, box: Box, out: Tensor) -> None:
        """Copy the box of the tensor `name` into `out`, which has the box's shape.

        The checkpoint's boxes of a tensor do not overlap. Raises ValueError if they do not cover the box.
        """
        found = 0
        for stored in self.index_of.get(name, ()):
            common = overlap(stored.box, box)
            if common is not None:
                values = self._slice(stored)[index(relative(common, stored.box))]
                out[index(relative(common, box))] = values.to(out.device, out.dtype)
                found += volume(common)
        if found != volume(box):
            raise ValueError(
                f"{self.directory} has only {found} of the {volume(box)} numbers of {name}{list(box)}; use "
                "another checkpoint."
            )

    def whole(self, name: str) -> Tensor:
        """Return a tensor that was written as one box."""
        [stored] = self.index_of[name]
        return self._slice(stored)[:]

    def _slice(self, stored: StoredBox) -> Any:
        if stored.file not in self._open:
            self._open[stored.file] = safe_open(self.directory / stored.file, framework="pt")
        return self._open[stored.file].get_slice(stored.key)
