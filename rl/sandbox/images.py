"""Images of containers on disk, unpacked once per node.

    unpack("/images/python.sif")    # Image(root=..., variables={...}, directory="/app")

An image is a root directory, a SIF file (Apptainer), a SquashFS file, or an archive of `docker save`,
`podman save` or `skopeo copy ... oci-archive:`. A directory of this user is used where it lies.
Anything else is unpacked into $LOCKSTEP_IMAGES, else $TMPDIR, with this user as the owner of every file: in a
user namespace of one user, files of others could not be written.
"""

import contextlib
import copy
import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl.sandbox.container import Image

_ALIGNMENT, _SEARCHED = 4096, 64 << 20
"""Bytes between places of a SIF file where its SquashFS may begin, and bytes that are searched for it."""
_READY = "image.json"


def unpack(path: str) -> Image:
    """Return an image, unpacked on this node if it must be; one process unpacks it, others wait.

    Raises ValueError if it is missing or of another kind, or cannot be unpacked.
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
        return Image(str(source))
    named = f"{source} {found.st_size} {found.st_mtime_ns} {found.st_ino}"
    place = _store() / hashlib.sha256(named.encode()).hexdigest()[:24]
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / _READY).exists():
            shutil.rmtree(place, ignore_errors=True)  # another process was killed while it unpacked
            place.mkdir()
            try:
                described = _unpack_into(place / "root", source)
            except (OSError, tarfile.TarError, KeyError, ValueError) as error:
                shutil.rmtree(place, ignore_errors=True)
                raise ValueError(f"container.image={path!r} cannot be unpacked: {error}") from error
            (place / _READY).write_text(json.dumps(described))
    return Image(str(place / "root"), **json.loads((place / _READY).read_text()))


def _store() -> Path:
    """Return this user's directory of unpacked images, which nobody else may enter."""
    parent = os.environ.get("LOCKSTEP_IMAGES") or tempfile.gettempdir()
    store = Path(parent, f"lockstep-images-{os.geteuid()}")
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = store.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ValueError(
            f"{store} is not a private directory of this user; remove it, or set LOCKSTEP_IMAGES."
        )
    return store


def _unpack_into(root: Path, source: Path) -> dict[str, Any]:
    """Unpack an image; return the arguments of `Image` that it states."""
    if source.is_dir():
        shutil.copytree(source, root, symlinks=True, ignore=_special_files)
        _make_writable(root)
        return {}
    if tarfile.is_tarfile(source):
        with tarfile.open(source) as archive:
            return _unpack_archive(archive, root)
    offset = _find_squashfs(source)
    if offset is None:
        raise ValueError("it is no directory, SIF, SquashFS, or archive of docker save or skopeo")
    program = shutil.which("unsquashfs")
    if program is None:
        raise ValueError("this needs unsquashfs (package squashfs-tools)")
    command = [program, "-no-xattrs", "-no-progress", "-offset", str(offset), "-dest", str(root), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 2) or not root.is_dir():  # 2: device files or owners, which need root
        raise ValueError(f"unsquashfs ended with {done.returncode}: {done.stderr[-1000:]}")
    _make_writable(root)
    return {}


def _find_squashfs(source: Path) -> int | None:
    """Return where the SquashFS of a file begins, 0 or inside a SIF file; None if there is none."""
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
    """Give the owner the rights that root would have, and as root the ownership."""
    for directory, _, files in os.walk(root):
        for path in (directory, *(f"{directory}/{name}" for name in files)):
            if os.geteuid() == 0:
                os.chown(path, 0, 0, follow_symlinks=False)
            if not os.path.islink(path):
                mode = stat.S_IMODE(os.lstat(path).st_mode)
                os.chmod(path, mode | (0o700 if path == directory else 0o600))


# ---- archives of layers ----


def _unpack_archive(archive: tarfile.TarFile, root: Path) -> dict[str, Any]:
    """Unpack the first image of an archive in the format of OCI, or of older versions of `docker save`."""
    names = {member.name.removeprefix("./"): member for member in archive}

    def read(name: str) -> Any:
        with archive.extractfile(names[name]) as file:  # type: ignore[union-attr]
            return json.load(file)

    def blob(described: dict[str, Any]) -> str:
        return "blobs/" + described["digest"].replace(":", "/")

    if "index.json" in names:
        described = read("index.json")
        while "manifests" in described:  # an index may name an index
            described = read(blob(described["manifests"][0]))
        layers, config = [blob(layer) for layer in described["layers"]], blob(described["config"])
    elif "manifest.json" in names:
        (described, *_) = read("manifest.json")
        layers, config = described["Layers"], described["Config"]
    else:
        raise ValueError("the archive has neither index.json nor manifest.json")
    root.mkdir()
    for layer in layers:
        with tarfile.open(fileobj=archive.extractfile(names[layer])) as opened:
            _apply_layer(opened, root)
    _make_writable(root)
    stated = read(config).get("config") or {}
    variables = dict(entry.split("=", 1) for entry in stated.get("Env") or [])
    return {"variables": variables, "directory": stated.get("WorkingDir") or "/"}


def _apply_layer(layer: tarfile.TarFile, root: Path) -> None:
    """Extract a layer over the ones below. `.wh.NAME` removes NAME, and `.wh..wh..opq` all below."""
    # Marks first: they are about lower layers, wherever they stand in this one.
    members = sorted(_owned(layer), key=lambda member: not _is_mark(member))
    for member in members:
        parent, name = os.path.split(os.path.normpath(f"/{member.name}"))
        target = Path(f"{root}{parent}")
        if not Path(os.path.realpath(target)).is_relative_to(os.path.realpath(root)):
            raise ValueError(f"the layer writes through a link out of the image: {member.name}")
        if name == ".wh..wh..opq":
            for entry in target.iterdir():
                _remove(entry)
        elif name.startswith(".wh."):
            _remove(target / name.removeprefix(".wh."))
        else:
            existing = target / name
            if existing.is_symlink() or (existing.exists() and not (existing.is_dir() and member.isdir())):
                _remove(existing)
            # Python before 3.11.4 has no filters; the same is done here for all versions.
            own = copy.copy(member)
            own.name, own.mode = f"{parent}/{name}".strip("/") or ".", member.mode & 0o755
            trusted = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
            layer.extract(own, root, numeric_owner=True, **trusted)


def _owned(layer: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the directories, files and links of a layer, with this user as the owner."""
    for member in layer:
        if member.isdir() or member.isreg() or member.issym() or member.islnk():
            member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
            yield member


def _is_mark(member: tarfile.TarInfo) -> bool:
    return os.path.basename(member.name).startswith(".wh.")


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
