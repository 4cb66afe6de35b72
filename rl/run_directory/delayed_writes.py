"""Writes that a full disk only delays, so that no run ends because a log cannot be written.

Checkpoints are not written in this way.

A failed write waits, and is tried again before the next write to the same file. At the end the log names the
missing writes. Nothing here is collective.
"""

import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

log = logging.getLogger(__name__)


class DelayedWrites:
    """The writes of one file or directory, in their order.

    limit: maximum number of waiting writes. If it is exceeded, the oldest is given up.
    """

    def __init__(self, path: Path, *, limit: int = 100_000):
        self._path, self._limit = path, limit
        self._waiting: list[tuple[str, Callable[[], None]]] = []
        self._missing: list[str] = []
        """Names of the writes that were given up."""
        self._fails = False

    def add(self, name: str, write: Callable[[], None], num_bytes: int = 0) -> None:
        """Do the waiting writes and then this one. After an OSError it waits, too; the first error is logged.

        name: the content in a message, such as step 3. num_bytes: size in the message; 0 if unknown.
        """
        self._waiting.append((name, write))
        self.retry(num_bytes)

    def append(self, step: int, line: str, *, sync: bool = False) -> None:
        """Append the record of a step to the file with `append_line`. It may wait, as in `add`."""
        self.add(f"step {step}", partial(append_line, self._path, line, sync=sync), len(line) + 1)

    def retry(self, num_bytes: int = 0) -> None:
        """Do the waiting writes, up to the first OSError."""
        while self._waiting:
            try:
                self._waiting[0][1]()
            except OSError as error:
                if not self._fails:
                    size = f", {num_bytes} bytes" if num_bytes else ""
                    log.warning(
                        "%s: %s%s cannot be written (%s; %s); the run goes on, and tries again",
                        self._path,
                        self._waiting[0][0],
                        size,
                        error.strerror or error,
                        _free(self._path),
                    )
                self._fails = True
                if len(self._waiting) > self._limit:
                    self._missing.append(self._waiting.pop(0)[0])
                return
            self._waiting.pop(0)
        if self._fails:
            log.warning("%s is written again%s", self._path, self._lacks(" and lacks"))
            self._fails = False

    def close(self) -> None:
        """Do the waiting writes, and log the writes that are missing."""
        self.retry()
        self._missing += [name for name, _ in self._waiting]
        if self._missing:
            log.warning("%s%s, which could not be written", self._path, self._lacks(" lacks"))

    def _lacks(self, words: str) -> str:
        more = f" and {len(self._missing) - 8} more" if len(self._missing) > 8 else ""
        return f"{words} {', '.join(self._missing[:8])}{more}" if self._missing else ""


def append_line(path: Path, line: str, *, sync: bool = False) -> None:
    """Append a whole line to a file. If this fails, append nothing and raise OSError.

    sync: wait until the line is on the disk, and the file's name if it is new.
    """
    is_new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size, rest = os.fstat(descriptor).st_size, (line + "\n").encode()
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if sync:
                os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)  # otherwise readers would find half a line before the next line
            raise
    finally:
        os.close(descriptor)
    if sync and is_new:
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)


def _free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free} bytes free there"
    except OSError as error:
        return f"an unreadable disk ({error.strerror})"
