"""Directories of a run, which hold samples, checkpoints and tokens on file systems that others use."""

import atexit
import contextlib
import grp
import os
import pwd
import shutil
import stat
import tempfile
from pathlib import Path

SOCKET_PATH, SOCKET_NAME = 107, 37
"""Maximum length of a Unix socket's path, and the length that vLLM adds to its directory, in bytes."""


def make_private(directory: Path) -> None:
    """Make a directory that only its user and, if the umask allows it, its group can enter.

    A directory that exists keeps its mode: `chmod o+rx` opens a run to everybody. Raises ValueError if it
    belongs to somebody else, or users outside its group may write to it.
    """
    directory.mkdir(mode=0o770, parents=True, exist_ok=True)
    found = directory.stat()
    reason = _why_foreign(directory, found, 0o002)
    if not reason:
        return
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory) as file:
        fresh = os.fstat(file.fileno())  # a file system without owners and modes gives all files the same
        if found.st_uid in (fresh.st_uid, *_trusted()) and not found.st_mode & ~fresh.st_mode & 0o002:
            return
    raise ValueError(
        f"{reason}, who may have put there what is in it; use another directory, or make it yours alone by "
        "chown and `chmod o-w`."
    )


def read_private(path: Path, *, limit: int, remedy: str) -> bytes:
    """Return the first `limit` bytes of a file that holds a secret, which only this user can read or write.

    Raises OSError if it cannot be read, and ValueError, which ends with the remedy, if others could have.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found, content = os.fstat(file.fileno()), file.read(limit)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
        raise ValueError(
            f"{path} has owner={found.st_uid} and mode={stat.S_IMODE(found.st_mode):04o}; it must be "
            "this user's with mode 0600; remove the file, or, on a file system without owners and modes, "
            f"{remedy}."
        )
    return content


def why_untrusted(directory: str | os.PathLike) -> str:
    """Return why others may change what is read from a directory, such as code; "" if nobody else may.

    It and every directory and link that leads to it belong to this user or to the system. Nobody else may
    write to it; to a directory above it only with the sticky bit, which keeps others from renaming.
    """
    path = Path(os.path.abspath(directory))
    try:
        os.stat(path)  # raises for links that lead to each other
        for place in (*reversed(path.parents), path):
            found = os.lstat(place)
            if stat.S_ISLNK(found.st_mode):
                target = place.parent / os.readlink(place) / path.relative_to(place)
                return _why_foreign(place, found, 0) or why_untrusted(target)
            is_kept = place != path and found.st_mode & stat.S_ISVTX
            if reason := _why_foreign(place, found, 0 if is_kept else 0o022):
                return reason
    except OSError as error:
        return f"{path} cannot be used: {error.strerror}"
    return ""


def _why_foreign(place: Path, found: os.stat_result, writers: int) -> str:
    """Return why a directory is not this user's alone. writers: bits of a mode that nobody else may have."""
    if found.st_uid not in _trusted():
        return f"{place} belongs to user {found.st_uid}"
    own = 0o020 if _has_one_member(found.st_gid) else 0
    return f"{place} can be written by other users" if found.st_mode & writers & ~own else ""


def _trusted() -> set[int]:
    """Return this user and the system's, which in some containers is not 0."""
    return {os.geteuid(), 0, os.stat("/").st_uid}


def _has_one_member(gid: int) -> bool:
    """Return whether a group is the user's private one, as many systems make them with umask 002."""
    try:
        group, name = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a number without a name
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def socket_directory() -> str:
    """Return a directory for sockets: the temporary directory, or a new one if that path is too long."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) + SOCKET_NAME <= SOCKET_PATH:
        return usual
    made, pid = tempfile.mkdtemp(prefix="lockstep-", dir="/tmp"), os.getpid()
    # A rank that an elastic run's agent forked shares it with others.
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == pid else None)
    return made
