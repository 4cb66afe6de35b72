"""Messages between ranks."""

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from rl.runtime.plain_data import decode, encode


@dataclass(frozen=True)
class Point:
    x: int
    path: np.ndarray


class Pair(NamedTuple):
    one: object
    other: object


def test_values_keep_their_types():
    values = [
        *(None, True, 1 << 70, -0.0, 1e-320, float("inf"), "\ud800\u00e9", b"", b"\x00\xff", Path("/a/b")),
        *((1, [2, (3,)]), {(1, 2): {"a"}, frozenset([3]): {}}, np.float32(0.1), np.int64(-3)),
        *(
            Decimal("1.50"),
            date(2026, 1, 2),
            datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
        ),  # of rows of parquet files
        {"t": [1], "d": {"o": 0}},  # keys that look like tags
    ]
    found = decode(encode(values))
    assert found == values and list(map(type, found)) == list(map(type, values))
    assert np.isnan(decode(encode(float("nan"))))


def test_arrays_are_bitwise_equal_and_writable():
    nan = np.array([0x7FC12345, 0xFFC00001], np.uint32).view(np.float32)
    arrays = [
        nan,
        np.array(2),
        np.zeros((0, 3), np.int8),
        np.arange(12.0).reshape(3, 4)[:, ::2],
        np.array(["ab"]),
    ]
    for array, copy in zip(arrays, decode(encode(arrays))):
        assert (copy.dtype, copy.shape, copy.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert copy.flags.writeable and copy.flags.aligned


def test_bytes_are_copied_once():
    message = encode([b"0123456789abcdef"] * 20_000)  # as many messages of generators
    copied = Slices(message)
    assert decode(copied) == [b"0123456789abcdef"] * 20_000
    assert copied.num_bytes < 2 * len(message)


class Slices(bytes):
    """Bytes that count what is copied from them."""

    num_bytes = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.num_bytes += len(found)
        return found


def test_only_listed_types_travel():
    message = Pair(Point(1, np.arange(3)), [Pair(1, 2)])
    found = decode(encode(message, Pair, Point), Pair, Point)
    assert type(found) is Pair and found.other == [Pair(1, 2)] and found.one.path.tolist() == [0, 1, 2]
    for value in (message, object(), np.array([object()]), len, Pair):
        with pytest.raises(TypeError, match="cannot be sent to other ranks"):
            encode(value)
    with pytest.raises(ValueError, match="is invalid"):
        decode(encode(message, Pair, Point), Pair)


def message_of(value: object) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        message_of({"a": ["|O", [1], 0]}) + bytes(8),
        message_of({"a": ["<i8", [-1], 0]}),
        message_of({"a": ["<i8", [1 << 60], 0]}),
        message_of({"a": ["<i8", [2], -8]}) + bytes(16),
        message_of({"o": [-1]}),
        message_of({"o": [0]}),
        message_of({"d": [1]}),
        message_of({"x": 1, "y": 2}),
        message_of({"import": "os"}),
        (1 << 62).to_bytes(8, "little") + b"[]x",
        message_of([])[:8] + b"[" * 100_000,
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_other_bytes_are_refused(content):
    with pytest.raises(ValueError, match="a message between ranks is invalid"):
        decode(content, Point)
