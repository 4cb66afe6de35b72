"""Directories of a run, which hold samples, checkpoints and tokens on file systems that others use."""

from pathlib import Path


def make_private(directory: Path) -> None:
    """Make a directory that only its user and, if the umask allows it, its group can enter.

    A directory that exists keeps its mode: `chmod o+rx` opens a run to everybody.
    """
    directory.mkdir(mode=0o770, parents=True, exist_ok=True)
