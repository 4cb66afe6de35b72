"""Directories of a run, which hold samples, checkpoints and tokens on file systems that others use."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

SOCKET_PATH, SOCKET_NAME = 107, 37
"""Maximum length of a Unix socket's path, and the length that vLLM adds to its directory, in bytes."""


def make_private(directory: Path) -> None:
    """Make a directory that only its user and, if the umask allows it, its group can enter.

    A directory that exists keeps its mode: `chmod o+rx` opens a run to everybody.
    """
    directory.mkdir(mode=0o770, parents=True, exist_ok=True)


def socket_directory() -> str:
    """Return a directory for sockets: the temporary directory, or a new one if that path is too long."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) + SOCKET_NAME <= SOCKET_PATH:
        return usual
    made, pid = tempfile.mkdtemp(prefix="lockstep-", dir="/tmp"), os.getpid()
    # A rank that an elastic run's agent forked shares it with others.
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == pid else None)
    return made
