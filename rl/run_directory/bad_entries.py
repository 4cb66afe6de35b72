"""Reads entries of a run directory. Tools name each unreadable entry in one line, and go on with the others.

Another user's directory, a file that a crash has cut off, or a stray file must not hide the other entries.
"""

import errno
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
FULL = errno.ENOSPC, errno.EDQUOT
OF_PATHS = errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EROFS
"""Numbers of the errors of a full disk, and of a wrong path."""


def read_each(paths: Iterable[Path], read: Callable[[Path], T]) -> dict[Path, T]:
    """Return path -> result of `read`, without the paths that it cannot read."""
    found = {}
    for path in paths:
        try:
            found[path] = read(path)
        except Exception as error:  # the type depends on the content
            skip(path, error)
    return found


def read_lines(path: Path, read: Callable[[Any], T]) -> list[T]:
    """Return what `read` makes of each JSON line of a file, without the lines that it cannot read."""
    found = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        try:
            found.append(read(json.loads(line)))
        except Exception as error:
            skip(path, ValueError(f"line {number} is not a record ({in_words(error)})"))
    return found


def skip(path: Path, error: BaseException) -> None:
    """Print in one line on stderr that an entry is skipped."""
    print(f"warning: {path} is skipped: {in_words(error)}", file=sys.stderr)


def sentence_of(error: BaseException) -> str:
    """Return the message of an error; of a wrong path or a full disk the path, the reason and a remedy."""
    if isinstance(error, OSError) and error.errno in FULL:
        return f"{error.filename or 'the disk'}: {error.strerror}; free space, or use another disk."
    if isinstance(error, OSError) and error.errno in OF_PATHS and error.filename:
        return f"{error.filename}: {error.strerror}; correct the path, or its permissions."
    return str(error)


def in_words(error: BaseException) -> str:
    """Return an error in one line, with its type if the message may be only a key or an index."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    return (kind + " ".join(text.split()))[:200]
