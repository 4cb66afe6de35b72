"""Texts about errors of users' code. Only the standard library is imported, so that a worker starts fast."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

MAX_ERROR_CHARS = 4000
OURS = ("<", str(Path(__file__).parents[1]) + os.sep, os.path.dirname(os.__file__) + os.sep)
"""Beginnings of the files whose code is Lockstep's or Python's."""
PACKAGES = ("site-packages", "dist-packages")


class RejectedResult(ValueError):
    """Raised when a user's function returns something that its caller cannot use."""


def explain(error: BaseException) -> str:
    """Return `sentence_of` an error, and below it the traceback from the first frame of the user's code on.

    The middle of a very long traceback is left out. A RejectedResult has no traceback.
    """
    trace = error.__traceback__
    sentence = sentence_of(error)
    traceback.clear_frames(trace)  # they may hold the objects that filled the memory
    if isinstance(error, RejectedResult):
        return sentence
    while trace is not None and not _is_users(trace):
        trace = trace.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__)).rstrip()
    except MemoryError:
        text = "MemoryError"
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[: MAX_ERROR_CHARS // 4]}\n[...]\n{text[-MAX_ERROR_CHARS * 3 // 4 :]}"
    return f"{sentence}\n{encodable(text)}"


def sentence_of(error: BaseException) -> str:
    """Return an error on one line, with the line of the user's code that raised it.

    For example, "ZeroDivisionError: division by zero (reward.py, line 12)".
    """
    text = str(error) if isinstance(error, RejectedResult) else _named(error)
    trace, place = error.__traceback__, ""
    while trace is not None:
        if _is_users(trace):
            place = f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return encodable(" ".join(text.split())[: MAX_ERROR_CHARS // 4] + place)


def place_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, with the file and line of its definition if it has one."""
    name, code = getattr(function, "__qualname__", repr(function)), getattr(function, "__code__", None)
    return f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else name


def shown(value: Any) -> str:
    """Return the type of a value, and its beginning or, of an array, its shape."""
    shape = getattr(value, "shape", None)
    of = f"{value!r:.80}" if shape is None else f"of shape {list(shape)} and {value.dtype}"
    return f"{type(value).__name__} {of}"


def _named(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(error))
    except MemoryError:
        return "MemoryError"


def _is_users(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return not file.startswith(OURS) and not any(name in file for name in PACKAGES)


def too_slow(timeout_s: float) -> str:
    return f"the call took longer than the limit of {timeout_s:g} s"


def encodable(text: str) -> str:
    """Replace lone surrogates by `?`, so that the text can be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
