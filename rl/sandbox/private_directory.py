"""Keeps directories and files of a run private: samples, checkpoints and tokens on shared file systems."""

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
"""Maximum length of the path of a Unix socket, and the length that vLLM appends to the directory, in
bytes."""


def make_private(directory: Path) -> None:
    """Make a directory that only its user and, if the umask allows it, its group can enter.

    An existing directory keeps its mode, so you can open a run to everybody with `chmod o+rx`. Raises
    ValueError as `refuse_untrusted` does.
    """
    for parent in (*reversed(directory.parents), directory):
        parent.mkdir(mode=0o770 if parent == directory else 0o775, exist_ok=True)
    refuse_untrusted(directory)


def refuse_untrusted(directory: str | os.PathLike) -> None:
    """Raise ValueError if plain data in a directory may come from users outside its group
    (`why_untrusted`)."""
    if reason := why_untrusted(directory, trusts_group=True):
        raise ValueError(
            f"{reason}, who may have put there what is in it; use another directory, or make it yours alone "
            "by chown and `chmod o-w`."
        )


def read_private(path: Path, *, limit: int, remedy: str) -> bytes:
    """Return the first `limit` bytes of a file with a secret, which only this user may read or write.

    Raises OSError if the file cannot be read. Raises ValueError, which ends with the remedy, if other users
    could read or write it.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found, content = os.fstat(file.fileno()), file.read(limit)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
        raise ValueError(
            f"{path} has owner={found.st_uid} and mode={stat.S_IMODE(found.st_mode):04o}; it must be "
            "this user's with mode 0600; remove the file, or, on a file system without owners and modes, "
            f"{remedy}."
        )
    return content


def why_untrusted(
    directory: str | os.PathLike, *, trusts_group: bool = False, is_shared: bool = False
) -> str:
    """Return why others may change what is read from a directory, such as code; "" if nobody else may.

    A directory is trusted under two conditions. First, it, and every directory and link that leads to it,
    must belong to this user or to the system. Second, nobody else may write to it; others may write to a
    directory above it only if that has the sticky bit, which keeps them from renaming entries. If the
    directory does not exist, the nearest directory above it is judged. For example, /tmp/run of this user is
    trusted, because /tmp belongs to the system and has the sticky bit.

    Args:
        trusts_group: whether the group of a directory, and the owners of directories above, may write. This
            is enough for plain data.
        is_shared: whether others may write to the directory itself if it has the sticky bit, as /tmp has.
    """
    path = Path(os.path.abspath(directory))
    while not os.path.lexists(path):
        path = path.parent
    try:
        os.stat(path)  # raises for links that lead to each other
        for place in (*reversed(path.parents), path):
            found, is_above = os.lstat(place), is_shared or place != path
            is_link, owner = stat.S_ISLNK(found.st_mode), found.st_uid
            writers = 0 if is_link or (is_above and found.st_mode & stat.S_ISVTX) else 0o022
            # With an access list, the bits of the group apply to the users in the list.
            if trusts_group or (_has_one_member(found.st_gid) and not _has_access_list(place)):
                writers &= 0o002
            reason = ""
            if owner not in _trusted() and not (trusts_group and is_above):
                reason = f"{place} belongs to user {owner}"
            elif found.st_mode & writers:
                reason = f"{place} can be written by other users"
            if reason and not (trusts_group and _has_no_owners(path, found)):
                return reason
            if is_link:
                target = place.parent / os.readlink(place) / path.relative_to(place)
                return why_untrusted(target, trusts_group=trusts_group, is_shared=is_shared)
    except OSError as error:
        return f"{path} cannot be used: {error.strerror}"
    return ""


def _has_no_owners(path: Path, found: os.stat_result) -> bool:
    """Return whether a place is on a directory's file system, which gives all files one owner and mode."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path) as file:
        fresh = os.fstat(file.fileno())
        is_common = found.st_uid in (fresh.st_uid, *_trusted()) and not found.st_mode & ~fresh.st_mode & 0o002
        return is_common and found.st_dev == fresh.st_dev
    return False


def _trusted() -> set[int]:
    """Return the ids of this user and of the system's user, which in some containers is not 0."""
    return {os.geteuid(), 0, os.stat("/").st_uid}


def _has_one_member(gid: int) -> bool:
    """Return whether a group is the user's private group, which many systems make together with umask 002."""
    try:
        group, name = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a number without a name
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _has_access_list(place: Path) -> bool:
    return "system.posix_acl_access" in os.listxattr(place, follow_symlinks=False)


def socket_directory() -> str:
    """Return a directory for sockets: the temporary directory, or a new one if that path is too long."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) + SOCKET_NAME <= SOCKET_PATH:
        return usual
    made, pid = tempfile.mkdtemp(prefix="lockstep-", dir="/tmp"), os.getpid()
    # Only the process that made it removes it: ranks that an elastic run's agent forked share it.
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == pid else None)
    return made
