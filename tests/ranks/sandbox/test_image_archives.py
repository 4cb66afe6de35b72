"""Images and task directories from anybody: nothing outside is read, written, linked or removed."""

import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from rl.features.containers import image_store
from rl.features.containers.harbor import Task, read_task
from rl.features.containers.image_store import unpack

SH = ("bin/sh", "program")


@pytest.fixture
def victim(tmp_path, monkeypatch):
    """A file of the user beside the store of images, which no image may touch."""
    monkeypatch.setenv("LOCKSTEP_IMAGES", str(tmp_path / "store"))
    path = tmp_path / "victim/secret"
    path.parent.mkdir()
    path.write_text("the user's")
    path.chmod(0o640)
    yield path
    found = path.stat()
    assert (path.read_text(), found.st_mode & 0o7777, found.st_nlink) == ("the user's", 0o640, 1)
    assert sorted(os.listdir(path.parent)) == ["secret"]


def member(name, content=None, **fields):
    """Return a member of a layer: a file, or what `fields` says."""
    info = tarfile.TarInfo(name)
    data = (content or "").encode()
    info.size, info.mode = len(data), 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def archive(path, layers, description=None):
    """Write an archive of `docker save`. Its layers are lists of members, or bytes."""
    with tarfile.open(path, "w") as saved:
        names = [f"{number}.tar" for number in range(len(layers))]
        described = description or [{"Layers": names, "Config": "config"}]
        blobs = {"manifest.json": json.dumps(described).encode(), "config": b"{}"}
        for name, members in zip(names, layers, strict=True):
            if isinstance(members, list):
                buffer = io.BytesIO()
                with tarfile.open(fileobj=buffer, mode="w") as layer:
                    for info, data in members:
                        layer.addfile(info, io.BytesIO(data))
                members = buffer.getvalue()
            blobs[name] = members
        for name, data in blobs.items():
            saved.addfile(member(name, size=len(data))[0], io.BytesIO(data))
    return str(path)


DIR, LINK, HARD, DEVICE = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE
OUTSIDE = {
    "a hard link": [member("x", type=HARD, linkname="{victim}"), member("x", "written")],
    "a hard link upwards": [member("x", type=HARD, linkname="../../../victim/secret")],
    "a hard link through a link": [
        member("up", type=LINK, linkname="{directory}"),
        member("x", type=HARD, linkname="up/secret"),
    ],
    "a file through a link": [
        member("up", type=LINK, linkname="{directory}"),
        member("up/secret", "written"),
        member("up/new", "written"),
    ],
    "a file through two links": [
        member("a", type=LINK, linkname="../../.."),
        member("b", type=LINK, linkname="a/victim"),
        member("b/secret", "written"),
    ],
    "a path upwards": [member("../../../victim/secret", "written"), member("{victim}", "written")],
    "a mark through a link": [member("up", type=LINK, linkname="{directory}"), member("up/.wh.secret")],
    "an opaque mark through a link": [
        member("up/.wh..wh..opq"),
        member("up", type=LINK, linkname="{directory}"),
    ],
    "a mark of what is above": [member(".wh..."), member("x/.wh...")],
    "a mark without a name": [member("x", type=DIR), member("x/.wh."), member("x/.wh..")],
    "links in a circle": [
        member("a", type=LINK, linkname="b"),
        member("b", type=LINK, linkname="a"),
        member("a/x", "written"),
    ],
    "a directory of the container": [
        member("etc", type=LINK, linkname="{directory}"),
        member("tmp", type=LINK, linkname="{directory}"),
    ],
}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("attack", OUTSIDE)
def test_a_layer_reaches_nothing_outside(attack, number, victim, tmp_path):
    """In one layer, and each member in a layer of its own."""
    members = [member(*SH)]
    for info, data in OUTSIDE[attack]:
        info = tarfile.TarInfo.frombuf(info.tobuf(), "utf-8", "strict")
        for field in ("name", "linkname"):
            text = getattr(info, field).replace("{victim}", str(victim))
            setattr(info, field, text.replace("{directory}", str(victim.parent)))
        members.append((info, data))
    layers = [members] if number == 1 else [[one] for one in members]
    try:
        root = Path(unpack(archive(tmp_path / "image.tar", layers)).root)
    except ValueError as error:
        assert "cannot be unpacked" in str(error)
        return
    assert (root / "bin/sh").read_text() == "program"
    assert not any(
        path.stat().st_ino == victim.stat().st_ino for path in root.rglob("*") if not path.is_symlink()
    )


def test_links_of_an_image_lead_to_places_in_it(victim, tmp_path):
    lower = [member(*SH), member("run/old", "x"), member("var/run", type=LINK, linkname="/run")]
    upper = [
        member("var/run/new", "y"),
        member("var/run/.wh.old"),
        member("again", type=HARD, linkname="/var/run/new"),
        member("dev/null", type=DEVICE),
        member("su", "z", mode=0o6755),
    ]
    root = Path(unpack(archive(tmp_path / "image.tar", [lower, upper])).root)
    assert sorted(os.listdir(root / "run")) == ["new"] and (root / "again").read_text() == "y"
    assert not (root / "dev/null").exists() and (root / "su").stat().st_mode & 0o7000 == 0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_opaque_mark_hides_lower_layers_wherever_it_stands(place, victim, tmp_path):
    upper = [member("a", type=DIR, mode=0o755), member("a/new", "x")]
    upper.insert(place, member("a/.wh..wh..opq"))
    layers = [
        [member(*SH), member("a/old", "x")],
        upper,
        [member("missing/.wh..wh..opq"), member(".wh.gone")],
    ]
    root = Path(unpack(archive(tmp_path / "image.tar", layers)).root)
    assert os.listdir(root / "a") == ["new"]


def bomb():
    """A layer that says to hold a gibibyte of zeros, in a megabyte."""
    start = member("x", size=1 << 30)[0].tobuf()
    return gzip.compress(start + bytes(1 << 30), 1)


def header(kind, size, data):
    """Return a layer that is one header, which says to have a size."""
    return gzip.compress(member("x", type=kind, size=size)[0].tobuf() + data, 1)


HUGE = {
    "bytes": (lambda: [[member(*SH)], bomb()], "is larger than 64 MiB"),
    "files": (lambda: [[member(f"x{number}") for number in range(1100)]], "and 1000 files"),
    "a header": (
        lambda: [header(tarfile.XHDTYPE, 200 << 20, bytes(200 << 20))],
        "a header or description has",
    ),
    "a long name": (lambda: [header(tarfile.GNUTYPE_LONGNAME, 1 << 32, b"")], "a header or description has"),
    "nothing": (lambda: [], "has no bin"),
    "an empty layer": (lambda: [[]], "has no bin"),
}


@pytest.mark.parametrize("what", HUGE)
def test_an_image_too_large_or_empty_is_refused(what, victim, tmp_path, monkeypatch):
    monkeypatch.setattr(image_store, "MAX_BYTES", 64 << 20)
    monkeypatch.setattr(image_store, "MAX_FILES", 1000)
    layers, message = HUGE[what]
    with pytest.raises(ValueError, match=rf"^container.image=.*cannot be unpacked: .*{message}"):
        unpack(archive(tmp_path / "image.tar", layers()))
    assert not list((tmp_path / "store").glob("*/*/root"))


DAMAGED = [{}, [], [{"Layers": [3], "Config": "config"}], [{"Layers": None}], [7], {"manifests": []}]


@pytest.mark.parametrize("described", DAMAGED)
def test_a_damaged_description_is_one_sentence(described, victim, tmp_path):
    with pytest.raises(ValueError, match=r"^container.image=.*cannot be unpacked"):
        unpack(archive(tmp_path / "image.tar", [[member(*SH)]], described or {"a": 1}))


def test_a_large_squashfs_file_is_refused(victim, tmp_path, monkeypatch):
    if shutil.which("mksquashfs") is None:
        pytest.skip("mksquashfs is not installed")
    monkeypatch.setattr(image_store, "MAX_BYTES", 64 << 20)
    (tmp_path / "root/bin").mkdir(parents=True)
    with open(tmp_path / "root/x", "wb") as file:
        file.truncate(1 << 30)
    subprocess.run(["mksquashfs", tmp_path / "root", tmp_path / "x.sqfs", "-quiet"], check=True)
    with pytest.raises(ValueError, match="is larger than 64 MiB"):
        unpack(str(tmp_path / "x.sqfs"))


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "task"
    for directory in ("environment/data", "tests"):
        (path / directory).mkdir(parents=True)
    (path / "instruction.md").write_text("do")
    (path / "tests/test.sh").write_text("true")
    (path / "environment/Dockerfile").write_text("FROM x\n")
    return path


class Copies(Task):
    """A task that lists its copies instead of making them."""

    def __init__(self, path):
        super().__init__(container={"image": "", "disk_mib": 1, "files": 9})
        self._read, self.copied = read_task(path), []

    def _put(self, path, data, *, mode=0o644):
        self.copied.append((path, data))


@pytest.mark.parametrize(
    "source", ["../../victim/secret", "/../../victim", "..", "../*", "data/../../../victim"]
)
def test_copy_with_dots_stays_in_the_context(source, victim, task):
    made = Copies(task)
    made._carry_out("COPY", f"{source} /x/", False)
    assert b"the user's" not in [data for _, data in made.copied]


@pytest.mark.parametrize("source", ["link", "data", "data/*", "."])
def test_copy_follows_no_link_out_of_the_task(source, victim, task):
    (task / "environment/link").symlink_to(victim.parent)
    (task / "environment/data/link").symlink_to(victim)
    made = Copies(task)
    with pytest.raises(ValueError, match="leads out of the task's directory"):
        made._carry_out("COPY", f"{source} /x/", False)


@pytest.mark.parametrize(
    "name", ["instruction.md", "task.toml", "environment/Dockerfile", "tests/x", "tests"]
)
def test_a_task_reads_no_link_out_of_its_directory(name, victim, task):
    place = task / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(victim.parent if name == "tests" else victim)
    with pytest.raises(ValueError, match="leads out of the task's directory"):
        read_task(task)


def test_copies_are_bounded(task):
    with open(task / "environment/data/x", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="disk_mib"):
        Copies(task)._carry_out("COPY", "data /x/", False)


def test_a_store_that_others_could_replace_is_refused(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("LOCKSTEP_IMAGES", str(tmp_path / "store/images"))
    (tmp_path / "image.tar").write_bytes(b"")
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(ValueError, match="store can be written by other users.*LOCKSTEP_IMAGES"):
        unpack(str(tmp_path / "image.tar"))
    (tmp_path / "store").chmod(0o1777)
    with pytest.raises(ValueError, match="cannot be unpacked"):
        unpack(str(tmp_path / "image.tar"))
