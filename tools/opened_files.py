"""Counts the files that a command and its processes open, and the bytes that they read, by strace."""

import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CALLS = ("open", "openat", "read", "pread64", "mmap")
CALL = re.compile(r"(?P<name>\w+)\((?P<words>.*)\) += (?P<result>0x[0-9a-f]+|\d+)(?:<(?P<opened>/[^>]*)>)?$")
PLACE = re.compile(r"\d+<(/[^>]*)>")
UNCOUNTED = ("/proc/", "/sys/", "/dev/null", "/dev/urandom")


@dataclass
class Opened:
    """The files that were opened below one mount point, and the bytes that were read there."""

    mount: str
    """Mount point and type of the file system, for example '/home (nfs4)'."""
    opens: int = 0
    files: set[str] = field(default_factory=set)
    read: int = 0
    """Bytes that were read."""
    mapped: int = 0
    """Bytes of files that were mapped into memory; a page is read when it is used."""


def count_opened(command: Sequence[str]) -> tuple[int, str]:
    """Run a command; return its exit code, and a table of its opened files by mount point.

    Raises ValueError if strace is not installed.
    """
    if shutil.which("strace") is None:
        raise ValueError("--opened needs strace, which is not on the PATH; install it.")
    with tempfile.TemporaryDirectory() as directory:
        # With -ff each process has a file, so that no line is interrupted by another process's call.
        trace = ["strace", "-ff", "-qq", "-y", "-s", "0", "-e", f"trace={','.join(CALLS)}"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock
        code = subprocess.run([*trace, "-o", f"{directory}/trace", *command]).returncode
        stored = 512 * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock - before)
        texts = (file.read_text(errors="replace") for file in Path(directory).iterdir())
        lines = (line for text in texts for line in text.splitlines())
        found = sorted(read_trace(lines), key=lambda each: -each.opens)
    return (
        code,
        f"{table(found)}\n{stored / 1e6:.1f} MB came from a disk, the other bytes from the page cache",
    )


def read_trace(lines: Iterable[str]) -> list[Opened]:
    """Return what strace's lines tell."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    found: dict[str, Opened] = {}
    for line in lines:
        call = CALL.match(line.strip())
        place = call and (call["opened"] or next(iter(PLACE.findall(call["words"])), ""))
        if call is None or not place or place.startswith(UNCOUNTED):
            continue
        mount, kind = max(
            (each for each in mounts if place.startswith(each[0])), key=lambda each: len(each[0])
        )
        own = found.setdefault(mount, Opened(f"{mount} ({kind})"))
        if call["opened"]:
            own.opens += 1
            own.files.add(place)
        elif call["name"] == "mmap":
            own.mapped += int(call["words"].split(",")[1])
        else:
            own.read += int(call["result"])
    return list(found.values())


def table(found: list[Opened]) -> str:
    """Return a line per mount point."""
    lines = [f"{'opens':>9}{'files':>9}{'MB read':>10}{'MB mapped':>11}  mount"]
    for own in found:
        sizes = f"{own.read / 1e6:10.1f}{own.mapped / 1e6:11.1f}"
        lines.append(f"{own.opens:9}{len(own.files):9}{sizes}  {own.mount}")
    return "\n".join(lines)
