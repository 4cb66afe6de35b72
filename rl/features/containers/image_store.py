"""Images of containers on disk, unpacked once per node.

    unpack("/images/python.sif")    # Image(root=..., variables={...}, directory="/app")

An image is a root directory, a SIF file (Apptainer), a SquashFS file, or an archive of `docker save`, `podman
save` or `skopeo copy ... oci-archive:`. A directory of this user is used in place. Any other image is
unpacked into $LOCKSTEP_IMAGES, else $TMPDIR. This user then owns every file, because in a user namespace of
one user the files of other users cannot be written.

An image may come from anybody. Its links are resolved inside the image, as in a container, so nothing outside
is read, linked, written or removed. For example, a link to /etc leads to the image's etc. Devices and setuid
bits are left out. At most MAX_FILES files and MAX_BYTES are unpacked, and at most half of the disk's free
space.
"""

import bz2
import contextlib
import copy
import fcntl
import functools
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.features.containers.container import ContainerImage, run_program_in
from rl.sandbox.private_directory import why_untrusted
from rl.sandbox.sandbox import ProgramOutcome

_ALIGNMENT, _SEARCHED = 4096, 64 << 20
"""Bytes between possible beginnings of the SquashFS in a SIF file, and maximum bytes to search."""
_READY = "image.json"
MAX_BYTES, MAX_FILES = 128 << 30, 4_000_000
"""Maximum bytes and files of an image to unpack."""
_MAX_READ = 64 << 20
"""Maximum bytes read into memory at once, for a description or a header of an archive."""


def unpack(path: str) -> ContainerImage:
    """Return an image; unpack it on this node if necessary. One process unpacks, and others wait for it.

    Raises ValueError if the image is missing, of another kind or cannot be unpacked.
    """
    source = Path(path).resolve()
    if not source.exists():
        raise ValueError(
            f"container.image={path!r} does not exist on {os.uname().nodename}; name a root directory, a SIF "
            "or SquashFS file, or an archive of docker save."
        )
    found = source.stat()
    if source.is_dir() and not (source / "bin").exists():
        raise ValueError(f"container.image={path!r} is a directory without bin; name the root of an image.")
    if source.is_dir() and found.st_uid == os.geteuid():
        return ContainerImage(str(source))
    named = f"{source} {found.st_size} {found.st_mtime_ns} {found.st_ino}"
    place = _store() / hashlib.sha256(named.encode()).hexdigest()[:24]
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / _READY).exists():
            shutil.rmtree(place, ignore_errors=True)  # another process was killed while it unpacked
            place.mkdir()
            try:
                described = _unpack_into(place / "root", source)
                if not os.path.lexists(place / "root" / "bin"):
                    raise ValueError("it is empty, or has no bin")
            except Exception as error:  # readers of damaged archives raise errors of any type
                shutil.rmtree(place, ignore_errors=True)
                raise ValueError(f"container.image={path!r} cannot be unpacked: {error}") from error
            (place / _READY).write_text(json.dumps(described))
    return ContainerImage(str(place / "root"), **json.loads((place / _READY).read_text()))


def _store() -> Path:
    """Return this user's private directory of unpacked images."""
    parent = os.environ.get("LOCKSTEP_IMAGES") or tempfile.gettempdir()
    store = Path(parent, f"lockstep-images-{os.geteuid()}")
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = store.lstat()
    reason = why_untrusted(store, trusts_group=True)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        reason = f"{store} is not a private directory of this user"
    if reason:
        raise ValueError(f"{reason}; remove it, or set LOCKSTEP_IMAGES to another directory.")
    return store


def _unpack_into(root: Path, source: Path) -> dict[str, Any]:
    """Unpack an image; return the arguments of `ContainerImage` that the image states."""
    room = Room(root.parent)
    if source.is_dir():
        for directory, _, files in os.walk(source):
            for path in (directory, *(f"{directory}/{name}" for name in files)):
                room.take(os.lstat(path).st_size if path != directory else 0)
        shutil.copytree(source, root, symlinks=True, ignore=_special_files)
        _make_writable(root)
        return {}
    if _find_squashfs(source) is None:
        with open(source, "rb") as file, _open_tar(file) as archive:
            return _unpack_archive(archive, root, room)
    program = shutil.which("unsquashfs")
    if program is None:
        raise ValueError("this needs unsquashfs (package squashfs-tools)")
    command = [program, "-no-progress", "-offset", str(_find_squashfs(source))]
    with subprocess.Popen([*command, "-lln", str(source)], stdout=subprocess.PIPE) as listing:
        assert listing.stdout is not None
        try:
            for line in listing.stdout:
                if found := re.match(rb"\S{10} \d+/\d+ +(\d+) ", line):
                    room.take(int(found[1]) if line.startswith(b"-") else 0)
        finally:
            listing.kill()
    command += ["-no-xattrs", "-dest", str(root), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 2) or not root.is_dir():  # 2: device files or owners need root
        raise ValueError(f"unsquashfs ended with {done.returncode}: {done.stderr[-1000:]}")
    _make_writable(root)
    return {}


class Room:
    """Files and bytes that an image may still use."""

    def __init__(self, place: Path):
        self._bytes = min(MAX_BYTES, shutil.disk_usage(place).free // 2)
        self._files = MAX_FILES
        self._limit = f"{self._bytes >> 20} MiB (at most half of the free disk) and {MAX_FILES} files"

    def take(self, size: int) -> None:
        """Count a file. Raises ValueError if the limit is exceeded."""
        self._bytes, self._files = self._bytes - size, self._files - 1
        if self._bytes < 0 or self._files < 0:
            raise ValueError(f"it is larger than {self._limit}; set LOCKSTEP_IMAGES to a larger disk")


def _find_squashfs(source: Path) -> int | None:
    """Return the offset of the SquashFS in a file, above 0 in a SIF file; None without a SquashFS."""
    with open(source, "rb") as file:
        for offset in range(0, min(source.stat().st_size, _SEARCHED), _ALIGNMENT):
            file.seek(offset)
            block = file.read(4)
            if block == b"hsqs":
                return offset
            if offset == 0 and b"SIF_MAGIC" not in block + file.read(124):
                return None
    return None


def _special_files(directory: str, names: list[str]) -> list[str]:
    """Return the entries that are no directory, regular file or link."""
    kinds = (stat.S_ISDIR, stat.S_ISREG, stat.S_ISLNK)
    return [n for n in names if not any(kind(os.lstat(f"{directory}/{n}").st_mode) for kind in kinds)]


def _make_writable(root: Path) -> None:
    """Give the owner the rights that root would have; if this process is root, make root the owner."""
    for directory, _, files in os.walk(root):
        for path in (directory, *(f"{directory}/{name}" for name in files)):
            if os.geteuid() == 0:
                os.chown(path, 0, 0, follow_symlinks=False)
            if not os.path.islink(path):
                mode = stat.S_IMODE(os.lstat(path).st_mode) & 0o777
                os.chmod(path, mode | (0o700 if path == directory else 0o600))


# ---- archives of layers ----


class _Bounded(io.BufferedIOBase):
    """A file that refuses large reads, so that no header fills the memory."""

    def __init__(self, file: Any):
        self._file = file

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MAX_READ:
            raise ValueError(f"a header or description has more than {_MAX_READ} bytes")
        return self._file.read(size)


def _open_tar(file: Any) -> tarfile.TarFile:
    """Open an archive, compressed or not."""
    start = file.read(2)
    file.seek(0)
    openers: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
    try:
        return tarfile.open(fileobj=_Bounded(openers.get(start, lambda file: file)(file)), mode="r:")
    except tarfile.ReadError as error:
        raise ValueError(
            f"it is no directory, SIF, SquashFS, or archive of docker save or skopeo ({error})"
        ) from error


def _unpack_archive(archive: tarfile.TarFile, root: Path, room: Room) -> dict[str, Any]:
    """Unpack the first image of an archive in the format of OCI, or of older versions of `docker save`."""
    names = {}
    for member in archive:
        names[member.name.removeprefix("./")] = member
        room.take(0)

    def read(name: str) -> Any:
        with archive.extractfile(names[name]) as file:  # type: ignore[union-attr]
            if names[name].size > _MAX_READ:
                raise ValueError(f"{name} has {names[name].size} bytes")
            return json.loads(file.read(_MAX_READ))

    def blob(described: dict[str, Any]) -> str:
        return "blobs/" + described["digest"].replace(":", "/")

    if "index.json" in names:
        described = read("index.json")
        for _ in range(9):  # an index may name an index
            if "manifests" in described:
                described = read(blob(described["manifests"][0]))
        layers, config = [blob(layer) for layer in described["layers"]], blob(described["config"])
    elif "manifest.json" in names:
        (described, *_) = read("manifest.json")
        layers, config = described["Layers"], described["Config"]
    else:
        raise ValueError("the archive has neither index.json nor manifest.json")
    root.mkdir()
    for layer in layers:
        with _open_tar(archive.extractfile(names[layer])) as opened:
            _apply_layer(opened, root, room)
    _make_writable(root)
    stated = read(config).get("config") or {}
    variables = dict(entry.split("=", 1) for entry in stated.get("Env") or [])
    return {"variables": variables, "directory": str(stated.get("WorkingDir") or "/")}


def _apply_layer(layer: tarfile.TarFile, root: Path, room: Room) -> None:
    """Extract a layer over the lower layers. `.wh.NAME` removes NAME of the lower layers, and `.wh..wh..opq`
    removes all their files in its directory."""
    # Marks first: they concern lower layers, wherever they stand in this layer.
    members = sorted(_owned(layer, room), key=lambda member: not Path(member.name).name.startswith(".wh."))
    for member in members:
        parent, name = os.path.split(os.path.normpath(f"/{member.name}"))
        target = _inside(root, parent)
        if name == ".wh..wh..opq":
            for entry in target.iterdir() if target.is_dir() else ():
                _remove(entry)
        elif name.startswith(".wh."):
            if (removed := name.removeprefix(".wh.")) in ("", ".", ".."):
                raise ValueError(f"the layer has the whiteout {member.name!r}, which names no file")
            _remove(target / removed)
        else:
            existing = target / name
            if existing.is_symlink() or (existing.exists() and not (existing.is_dir() and member.isdir())):
                _remove(existing)
            # Python before 3.11.4 has no filters, and the filter `data` refuses absolute links, which images
            # have: links in an image are resolved here, as in a container.
            own = copy.copy(member)
            own.name = str(existing.relative_to(root))
            own.mode = member.mode & 0o755 | (0o700 if member.isdir() else 0)
            if member.islnk():
                linked, name = os.path.split(os.path.normpath(f"/{member.linkname}"))
                os.link(_inside(root, linked) / name, existing, follow_symlinks=False)
                continue
            trusted: dict[str, Any] = (
                {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
            )
            layer.extract(own, root, numeric_owner=True, **trusted)


def _inside(root: Path, path: str) -> Path:
    """Return the target of a path of an image, with all links resolved as in a container."""
    waiting, at, links = path.split("/")[::-1], root, 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            at = at.parent if at != root else root
        elif part and (at / part).is_symlink():
            target, links = os.readlink(at / part), links + 1
            if links > 40:
                raise ValueError(f"{path} has links that form a cycle")
            at = root if target.startswith("/") else at
            waiting += target.split("/")[::-1]
        elif part not in ("", "."):
            at = at / part
            if at.exists() and not at.is_dir():  # a directory of this layer takes its place
                at.unlink()
    return at


def _owned(layer: tarfile.TarFile, room: Room) -> Iterator[tarfile.TarInfo]:
    """Yield the directories, files and links of a layer, with this user as the owner."""
    for member in layer:
        room.take(member.size)
        if member.isdir() or member.isreg() or member.issym() or member.islnk():
            member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
            yield member


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def runner(settings: Mapping[str, Any]) -> Callable[..., ProgramOutcome]:
    """Return `run_program_in` for an image. settings: items of `rl.config.container`."""
    return functools.partial(run_program_in, unpack(settings["image"]), settings)
