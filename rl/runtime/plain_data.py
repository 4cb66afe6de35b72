"""Plain data as bytes, for messages between the ranks of a job.

    content = encode(Done(aborted=True), Add, Done)    # the types that this message may contain
    event = decode(content, Add, Done)

Unlike a pickle, a message cannot name code: `decode` makes only the built-in types below, numpy arrays, and
instances of the types that its caller lists. The values are JSON; arrays and bytes follow it unchanged. For
example, the tuple (1, 2) is {"t": [1, 2]}.

None, bool, int, float, str, list     as in JSON
tuple, set, frozenset, dict           {"t" | "s" | "f" | "d": [item, ...]}; a dict's keys and values alternate
bytes                                 {"b": [offset, size]}
np.ndarray, np.generic                {"a" | "n": [dtype, shape, offset]}
Path, Decimal, date, datetime         {"p" | "m" | "y" | "i": text}
a listed dataclass or NamedTuple      {"o": [index in the list, field, ...]}
"""

import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal
from math import prod
from pathlib import Path, PosixPath
from typing import Any

import numpy as np

_PLAIN = frozenset((type(None), bool, int, float, str))
_HEAD = 8
"""Number of bytes at the start of a message that hold the size of the JSON."""


def encode(value: Any, *types: type) -> bytes:
    """Return the value as bytes. Raises TypeError for a value of a type that is not listed.

    types: dataclasses and NamedTuples that the value may contain; `decode` needs the same.
    """
    buffers: list[bytes] = []
    size = 0
    index_of = {kind: index for index, kind in enumerate(types)}

    def keep(content: bytes) -> int:
        nonlocal size
        buffers.append(content)
        size += len(content)
        return size - len(content)

    def items(values: Any) -> list:
        return [item if type(item) in _PLAIN else plain(item) for item in values]

    def plain(item: Any) -> Any:
        kind: Any = type(item)
        if kind in _PLAIN:
            return item
        if kind is list:
            return items(item)
        if kind is dict:
            return {"d": items(part for pair in item.items() for part in pair)}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: items(item)}
        if kind is bytes:
            return {"b": [keep(item), len(item)]}
        if (kind is np.ndarray or isinstance(item, np.generic)) and not item.dtype.hasobject:
            tag = "a" if kind is np.ndarray else "n"
            return {tag: [item.dtype.str, item.shape, keep(item.tobytes())]}
        if kind in index_of:
            return {"o": [index_of[kind], *items(_fields_of(kind)(item))]}
        if kind in _AS_TEXT:
            tag, text_of = _AS_TEXT[kind]
            return {tag: text_of(item)}
        raise TypeError(
            f"{kind.__module__}.{kind.__qualname__} cannot be sent to other ranks; convert it to plain data "
            "or list its type at the call."
        )

    text = json.dumps(plain(value), separators=(",", ":")).encode()
    return b"".join((len(text).to_bytes(_HEAD, "little"), text, *buffers))


def decode(content: bytes, *types: type) -> Any:
    """Return the value that `encode` was given. Raises ValueError for anything else."""
    start = _HEAD + int.from_bytes(content[:_HEAD], "little")

    def array(dtype: str, shape: list[int], offset: int) -> np.ndarray:
        kind, size = np.dtype(dtype), prod(shape)
        if kind.hasobject or offset < 0 or size < 0:
            raise ValueError("not an array of numbers")
        # Copied, because an array must be writable and aligned.
        found = np.frombuffer(content, kind, size, start + offset).copy() if size else np.empty(0, kind)
        return found if len(shape) == 1 else found.reshape(shape)

    make: dict[str, Callable[[Any], Any]] = {
        "t": tuple,
        "s": set,
        "f": frozenset,
        "d": lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
        "b": lambda place: content[start + place[0] : start + sum(place)],
        "a": lambda parts: array(*parts),
        "n": lambda parts: array(*parts)[()],
        "o": lambda parts: _instance(types, *parts),
        "p": Path,
        "m": Decimal,
        "y": date.fromisoformat,
        "i": datetime.fromisoformat,
    }

    def hook(tagged: dict[str, Any]) -> Any:
        ((tag, parts),) = tagged.items()
        return make[tag](parts)

    try:
        return json.loads(content[_HEAD:start], object_hook=hook)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"a message between ranks is invalid: {error!r}") from error


_SEQUENCES: dict[type, str] = {tuple: "t", set: "s", frozenset: "f"}
_AS_TEXT: dict[type, tuple[str, Callable[[Any], str]]] = {
    PosixPath: ("p", str),
    Decimal: ("m", str),
    date: ("y", date.isoformat),
    datetime: ("i", datetime.isoformat),
}


@functools.cache
def _fields_of(kind: Any) -> Callable[[Any], Sequence]:
    """Return a function that gives the fields of an instance in the order of the constructor's arguments."""
    if issubclass(kind, tuple):
        return tuple
    names = [field.name for field in dataclasses.fields(kind)]
    return operator.attrgetter(*names) if len(names) > 1 else lambda item: [getattr(item, n) for n in names]


def _instance(types: Sequence[type], index: int, *values: Any) -> Any:
    return types[range(len(types))[index]](*values)
