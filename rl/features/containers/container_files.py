"""The files of a container: its layers and mounts, and the files that tests see.

container_child.py imports this module without the package, so the module imports only the standard library.
It runs in the mount namespace of a container. See Documentation/filesystems/overlayfs.rst and openat2(2).
"""

import contextlib
import ctypes
import errno
import os
import stat
import struct
from typing import Any

import kernel
import leftovers

NOSUID, NODEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 2, 4, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_OPENAT2, _NO_MAGIC_LINKS, _NO_LINKS, _IN_ROOT = 437, 2, 4, 16
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
_READ_ONLY = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
"""Parts of /proc that belong to the machine. A container started by the host's root could write to them."""
_OWN = {"dev", "proc", "sys", "tmp"}
"""Directories of the root that never hold a policy's answer."""
_SYSTEM = set("bin boot etc lib lib32 lib64 libx32 opt run sbin tests usr var".split()) | _OWN
"""Directories of the root that tests see sealed unless they are `kept`."""


def _make(path: str, text: str | None = None) -> None:
    """Make a directory, or a file with `text`, unless it exists."""
    if not os.path.lexists(path):
        if text is None:
            os.makedirs(path)
        else:
            with open(path, "w") as file:
                file.write(text)


def overlay(top: str, name: str, lower: list[int]) -> str:
    """Mount directories, the uppermost first, below a new layer for writes in `top`; return their root."""
    for part in ("upper", "work", "root", "shm"):
        os.makedirs(f"{top}/{name}/{part}")
    root, upper = f"{top}/{name}/root", f"upperdir={top}/{name}/upper,workdir={top}/{name}/work,userxattr"
    layers = ":".join(f"/proc/self/fd/{fd}" for fd in lower)  # a path may hold colons or commas
    kernel.mount("overlay", root, "overlay", NOSUID | NODEV, f"lowerdir={layers},{upper}")
    return root


def limit_watchers() -> None:
    """Limit the instances of inotify in this user namespace, because each has a queue of about 8 MiB."""
    with open("/proc/sys/user/max_inotify_instances", "w") as file:
        file.write("16")


def build(job: dict[str, Any], image: int) -> str:
    """Mount everything in this mount namespace; return the root of the container."""
    top, limits = job["scratch"], job["limits"]
    size = f"mode=755,size={limits['disk_mib']}m,nr_inodes={limits['files']}"
    kernel.mount("tmpfs", top, "tmpfs", NOSUID | NODEV, size)
    os.mkdir(f"{top}/dev")
    root = overlay(top, "first", [image])
    for name in ("dev", "proc", "sys", "tmp", "etc"):  # a runtime needs these in the image
        if os.path.islink(f"{root}/{name}"):  # outside the container the link would lead out of the image
            os.unlink(f"{root}/{name}")
        _make(f"{root}/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        _make(f"{root}/etc/{name}", "")
    # A runtime takes over these directories from the host. None of them may hold anything of the host.
    kernel.mount("tmpfs", f"{top}/dev", "tmpfs", NOSUID, "mode=755,size=1m,nr_inodes=64")
    for name in _DEVICES:
        _make(f"{top}/dev/{name}", "")
        kernel.mount(f"/dev/{name}", f"{top}/dev/{name}", None, BIND)
        kernel.set_read_only(f"{top}/dev/{name}", 0)  # root could change its mode; writes still reach it
    for name, target in _LINKS.items():
        os.symlink(target, f"{top}/dev/{name}")
    for name in ("pts", "shm", "mqueue"):
        os.mkdir(f"{top}/dev/{name}")
    kernel.set_read_only(f"{top}/dev", 0)  # its links, such as /dev/stdout, are for the tests too
    kernel.mount("devpts", f"{top}/dev/pts", "devpts", NOSUID, "newinstance,ptmxmode=0666,mode=620,max=64")
    kernel.mount(f"{top}/dev", "/dev", None, BIND | RECURSIVE)
    for path in filter(os.path.exists, ("/etc/hosts", "/etc/resolv.conf")):
        with open(path) as file:
            _make(f"{top}/{os.path.basename(path)}", file.read())
        kernel.mount(f"{top}/{os.path.basename(path)}", path, None, BIND)
        kernel.set_read_only(path, 0)
    kernel.mount("proc", "/proc", "proc", NOSUID | NODEV)
    for path in filter(os.path.exists, _READ_ONLY):
        kernel.mount(path, path, None, BIND | RECURSIVE)
        kernel.set_read_only(path, 0x8000)
    kernel.mount("tmpfs", "/sys", "tmpfs", NOSUID | NODEV, "size=0,nr_inodes=1,mode=555")
    kernel.set_read_only("/sys", 0)
    return root


# ---- what tests see ----


class Root:
    """A root directory of untrusted files; no path or link leads out of it."""

    def __init__(self, path: str, held: contextlib.ExitStack):
        self.path, self._held = path, held
        self._fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        held.callback(os.close, self._fd)

    def open(self, path: str, *, through_links: bool = False) -> int | None:
        """Open a path with O_PATH until the end of `held`, by openat2(2); return None if the path does not
        exist."""
        resolve = _IN_ROOT | _NO_MAGIC_LINKS | (0 if through_links else _NO_LINKS)
        how = ctypes.c_char_p(struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, resolve))
        while True:
            try:
                fd = kernel.syscall(_OPENAT2, path, self._fd, ctypes.c_char_p(os.fsencode(path)), how, 24)
            except BlockingIOError:  # something on this machine was renamed meanwhile
                continue
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    return None
                raise
            self._held.callback(os.close, fd)
            return fd

    def real(self, path: str) -> str:
        """Return a path without links. For example, with /bin a link to usr/bin, /bin/new becomes
        /usr/bin/new, even if the file new does not exist."""
        if (fd := self.open(path, through_links=True)) is not None:
            return os.readlink(f"/proc/self/fd/{fd}").removeprefix(self.path) or "/"
        parent, name = os.path.split(os.path.normpath(path))
        return os.path.join(self.real(parent), name)

    def show(self, shown: int | None, path: str) -> None:
        """Bind an opened file or directory to a path without links. With anything else, remove the entry at
        the path."""
        parts, at = [part for part in path.split("/") if part], self.path
        kind = stat.S_IFMT(os.fstat(shown).st_mode) if shown is not None else 0
        for number, part in enumerate(parts, 1):
            at, wanted = f"{at}/{part}", kind if number == len(parts) else stat.S_IFDIR
            found = stat.S_IFMT(os.lstat(at).st_mode) if os.path.lexists(at) else None
            if found is not None and found != wanted:
                leftovers.remove_directory(at) if found == stat.S_IFDIR else os.unlink(at)
            if wanted not in (stat.S_IFDIR, stat.S_IFREG):
                return
            if found != wanted:
                _make(at, "" if wanted == stat.S_IFREG else None)
        # Not RECURSIVE, because a path both kept and protected would show the mount over it.
        kernel.mount(f"/proc/self/fd/{shown}", at, None, BIND)


def _written(left: Root, changes: Root) -> list[str]:
    """Return the directories of the root that commands wrote to or removed, except the system's."""
    paths = [f"/{name}" for name in os.listdir(changes.path) if name not in _SYSTEM]
    return [p for p in paths if os.path.isdir(left.path + p) or not os.path.lexists(left.path + p)]


def show_tests(sealed: Root, left: Root, changes: Root, request: dict[str, Any]) -> dict[str, list[str]]:
    """Show below `sealed`, at the paths `kept`, the files that commands left there.

    See `RunningContainer.restore`. changes: the files that commands wrote.
    """
    written = [] if "/" not in request["kept"] else _written(left, changes)
    kept = sorted({sealed.real(path) for path in request["kept"] + written} - {"/"})

    def is_kept(path: str) -> bool:
        return any(f"{path}/".startswith(f"{place}/") for place in kept)

    programs, protected = [], {sealed.real(path) for path in request["protected"]}
    for entry in request["programs"]:
        at = sealed.real(entry)
        place = os.path.dirname(at) if os.path.basename(at) == "bin" else at
        if place not in kept:
            programs.append(entry)
            protected.add(place)
    shown = {path: sealed.open(path) for path in sorted(protected) if is_kept(path)}
    for path in kept:
        sealed.show(left.open(path), path)
    for path, fd in shown.items():
        sealed.show(fd, path)
    above = {path.split("/")[1] for path in kept} | _OWN
    unseen = [f"/{name}" for name in os.listdir(changes.path) if name not in above]
    unseen += [path for path in shown if changes.open(path) is not None]
    return {"unseen": unseen, "programs": programs}
