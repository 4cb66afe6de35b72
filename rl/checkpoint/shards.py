"""The file that one rank writes: boxes of tensors, in the safetensors format, with a checksum made on the way.

A tensor of the file is called `policy/exp_avg/model.norm.weight[0:64]`: the model, which number of each weight, the Hugging
Face tensor and the box of it. Nothing is pickled, and any safetensors reader opens it. The writer is our own for three
reasons: it holds no second copy, hashes what it writes, and lets other threads run meanwhile.
"""

import ctypes
import json
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rl.checkpoint.boxes import extent, overlap, volume
from rl.models.layout import Box, index

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
BUFFER_BYTES = 8 << 20


@dataclass(frozen=True)
class Shard:
    """A box of the tensor `name`, and its elements on any device."""

    name: str
    box: Box
    tensor: Tensor

    @property
    def key(self) -> str:
        return f"{self.name}[{','.join(f'{start}:{stop}' for start, stop in self.box)}]"


@dataclass(frozen=True)
class Written:
    """What a file should hold; crc32 is against accidents, not against forgers."""

    bytes: int
    crc32: int


class DamagedError(Exception):
    """A file of a checkpoint is not what was written; the message names it."""


def in_file_order(shards: Iterable[Shard]) -> list[Shard]:
    """Wide elements first, so that each tensor of the file begins at a multiple of its element's size."""
    return sorted(shards, key=lambda shard: -shard.tensor.itemsize)


def num_bytes(shards: Iterable[Shard]) -> int:
    return sum(shard.tensor.nbytes for shard in shards)


def write_shards(path: Path, shards: Sequence[Shard]) -> Written:
    """Write shards (`in_file_order`) and wait until they are on the disk. OSError if that fails. Not collective."""
    header, at = {}, 0
    for shard in shards:
        size = shard.tensor.nbytes
        header[shard.key] = dict(
            dtype=DTYPES[shard.tensor.dtype], shape=list(extent(shard.box)), data_offsets=[at, at + size]
        )
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=BUFFER_BYTES) as file:
        start = len(text).to_bytes(8, "little") + text
        crc = zlib.crc32(start)
        file.write(start)
        for shard in shards:
            tensor = shard.tensor.detach().cpu().contiguous()
            # Not by numpy(): torch then never resizes that storage again, which rl.training.offload does.
            part = memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
            crc = zlib.crc32(part, crc)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return Written(8 + len(text) + at, crc)


def check_file(path: Path, expected: Written, *, contents: bool) -> None:
    """Raise DamagedError if the file does not have the size that was written, or, with `contents`, is not what was written.
    Not collective."""
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            raise DamagedError(f"{path} has {size} bytes, but {expected.bytes} were written")
        if not contents:
            return
        crc = 0
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(BUFFER_BYTES):
                crc = zlib.crc32(chunk, crc)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing")
    if crc != expected.crc32:
        raise DamagedError(
            f"{path} is damaged: its checksum is {crc:08x}, but {expected.crc32:08x} was written"
        )


@dataclass(frozen=True)
class Stored:
    """Where a box lies."""

    box: Box
    file: str
    key: str


Index = dict[str, list[Stored]]
"""By the tensor's name."""


def read_index(directory: Path, files: Iterable[str]) -> Index:
    """What the files hold. Reads their headers only. Not collective."""
    index_of: Index = {}
    for file in files:
        with open(directory / file, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for key in header:
            name, box = _parse(key)
            index_of.setdefault(name, []).append(Stored(box, file, key))
    return index_of


def _parse(key: str) -> tuple[str, Box]:
    match = re.fullmatch(r"(.+)\[([\d:,]*)\]", key)
    assert match, key
    return match[1], tuple(tuple(map(int, part.split(":"))) for part in match[2].split(","))


class ShardReader:
    """Any box of the tensors of a checkpoint. Reads what is asked for and no more."""

    def __init__(self, directory: Path, index_of: Index):
        self.directory, self.index_of = directory, index_of
        self._open: dict[str, Any] = {}

    def fill(self, name: str, box: Box, out: Tensor) -> None:
        """Copy the box into `out`, of its shape. The checkpoint's boxes of a tensor do not overlap. ValueError if they leave
        a gap."""
        found = 0
        for stored in self.index_of.get(name, ()):
            common = overlap(stored.box, box)
            if common is not None:
                values = self._slice(stored)[index(_within(common, stored.box))]
                out[index(_within(common, box))] = values.to(out.device, out.dtype)
                found += volume(common)
        if found != volume(box):
            raise ValueError(
                f"{self.directory} has {found} of the {volume(box)} numbers that this run needs of {name}."
            )

    def whole(self, name: str) -> Tensor:
        """A tensor that was written in one box."""
        [stored] = self.index_of[name]
        return self._slice(stored)[:]

    def _slice(self, stored: Stored):
        if stored.file not in self._open:
            self._open[stored.file] = safe_open(self.directory / stored.file, framework="pt")
        return self._open[stored.file].get_slice(stored.key)


def _within(box: Box, outer: Box) -> Box:
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer))
