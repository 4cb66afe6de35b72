"""Handles what a program leaves behind: output in pipes, processes and files.

The scripts child.py and container_child.py import this file without the package, so it imports only the
standard library.
"""

import errno
import os
import signal
import stat
from collections.abc import Iterable


def collect(fd: int, data: bytearray, limit: int) -> bool:
    """Read available bytes into `data` until it exceeds the limit. Return False at the end of the pipe."""
    while len(data) <= limit:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        data += chunk
    return True


def descendants(root: int) -> list[int]:
    """Return all descendants of `root`, nearest first.

    None is missed: the watcher is a subreaper, so orphans become its children.
    """
    found = [root]
    for pid in found:  # grows during the iteration
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return found[1:]


def kill_descendants() -> None:
    """Kill all descendants and wait for them. All are stopped first, so that none can fork."""
    seen: set[int] = set()
    while new := set(descendants(os.getpid())) - seen:
        seen |= new
        _send(new, signal.SIGSTOP)
    while True:
        _send(descendants(os.getpid()), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def remove_directory(path: str) -> None:
    """Remove a directory and its contents.

    Subdirectories are moved up before they are emptied. The reason is that a program can nest them so deep
    that their path is too long, or that shutil.rmtree exceeds the recursion limit.
    """
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    moved = 0
    while names := os.listdir(top):
        for name in names:
            if not _unlock(name, top):
                os.unlink(name, dir_fd=top)
                continue
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            for inner in os.listdir(fd):
                moved += 1
                _unlock(inner, fd)  # only its owner's right to write allows a directory to be moved
                try:
                    os.rename(inner, f".moved-{os.getpid()}-{moved}", src_dir_fd=fd, dst_dir_fd=top)
                except OSError as error:  # it belongs to an overlay's lower layer, where no program nested it
                    if error.errno != errno.EXDEV:
                        raise
                    remove_directory(f"/proc/self/fd/{fd}/{inner}")
            os.close(fd)
            os.rmdir(name, dir_fd=top)
    os.close(top)
    os.rmdir(path)


def _unlock(name: str, parent: int) -> bool:
    """Return whether an entry is a directory. If it is, give its owner all rights."""
    is_directory = stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    if is_directory:
        os.chmod(name, 0o700, dir_fd=parent)
    return is_directory
