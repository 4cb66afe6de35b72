"""The commands of README.md, CONTRIBUTING.md and docs/: which blocks are run, how, and why others are not.

A comment before a fenced block of bash says what becomes of it; for a whole page the first word is `all`:

    <!-- commands: run -->                 run by tests/runs/test_doc_commands.py
    <!-- commands: slow -->                run by the same test with --slow, after the page's earlier blocks
    <!-- commands: slurm -->               run on the cluster of tests/slurm
    <!-- commands: not run, REASON -->
    <!-- all commands: not run, REASON -->

Blocks of a page run in order, in one shell, in one copy of what git tracks. `<!-- file: NAME -->` before
a fenced block of any language writes the block to a file first. A block of text after `<!-- output -->` shows
lines of the output so far; they are compared without their numbers. A block after `<!-- config -->` is a
configuration, which has to pass the checks.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.spawn import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WHOLE_PAGE = re.compile(r"^<!-- all (commands: [^\n]*) -->$", re.MULTILINE)
MODES = ("run", "slow", "slurm")


class Block(NamedTuple):
    kind: str
    """One of MODES, `not run`, `file`, `output` or `config`; empty for commands without a mark."""
    argument: str
    """The reason of `not run`, the name of a file."""
    text: str
    place: str
    """Page and line."""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the marked blocks and all blocks of bash of a page."""
    text = page.read_text(encoding="utf-8")
    default = WHOLE_PAGE.search(text)
    for match in FENCE.finditer(text):
        mark, language, content = match.groups()
        place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start(2)) + 1}"
        if language == "bash" and not (mark or "").startswith(("commands:", "file:")):
            mark = default[1] if default else ""
        name, _, argument = (mark or "").partition(": ")
        if name == "commands":
            kind, _, reason = argument.partition(", ")
            yield Block(kind, reason, content, place)
        elif name in ("file", "output", "config"):
            yield Block(name, argument, content, place)
        elif language == "bash":
            yield Block("", "", content, place)


def pages_with(*modes: str) -> list[str]:
    """Return the pages that have a block of one of the modes, as paths below the root."""
    return [str(page.relative_to(ROOT)) for page in PAGES if any(b.kind in modes for b in blocks(page))]


def copy_tree(directory: Path) -> None:
    """Copy what git tracks, or would track, and make a .venv for the tests' own environment."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    there = b"".join(
        name + b"\0" for name in names.split(b"\0") if name and (ROOT / os.fsdecode(name)).exists()
    )
    pack = ["tar", "-c", "--null", "-T", "-", "-f", directory / "tree.tar"]
    subprocess.run(pack, cwd=ROOT, input=there, check=True)
    subprocess.run(["tar", "-xf", "tree.tar"], cwd=directory, check=True)
    activate = directory / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'export VIRTUAL_ENV={sys.prefix} PATH={sys.prefix}/bin:"$PATH"\n')
    (directory / "tools" / "install_cpu.sh").write_text("")  # the tests' environment is installed


def patterns(output: str) -> list[str]:
    """Return the lines without numbers, runs of spaces and the seconds of phases: equal in another run."""
    lines = (re.sub(r" s: .*?(?=\||$)", " s: ", line) for line in output.splitlines())
    return [re.sub(r"\s+", " ", re.sub(r"-?\d[\d.,e+-]*", "#", line)).strip() for line in lines]
