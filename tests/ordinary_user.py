"""Run a command as a user without rights: `python tests/ordinary_user.py SCRATCH COMMAND ...`, as root.

The user is a number without a name, so that nothing is added to the machine's list of users. The checkout and
the interpreter may lie below directories that this user must not enter (/root, or one of mktemp). In a
private mount namespace an empty directory is therefore mounted over each of these, and only what the command
needs is bound into it; nothing changes for other processes. SCRATCH becomes the user's own: home, temporary
and working files.
"""

import ctypes
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UID = 64321
"""Number of the user and of its group, above the numbers that distributions give to people and daemons."""
NOT_PERMITTED = 77
"""Exit status if this machine permits no mount namespace."""
_NEWNS, _BIND, _RECURSIVE, _PRIVATE = 0x20000, 1 << 12, 1 << 14, 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)


def as_ordinary_user(scratch: Path, command: Sequence[str], **options) -> subprocess.CompletedProcess:
    """Run a command as the ordinary user; skip the test if that is impossible here.

    Args:
        scratch: a directory of the test, which becomes the user's.
        options: of `subprocess.run`; the output is captured as text.
    """
    if os.geteuid() != 0:
        pytest.skip("these tests run as an ordinary user already")
    starter = [sys.executable, __file__, str(scratch), *command]
    done = subprocess.run(starter, capture_output=True, text=True, **options)
    if done.returncode == NOT_PERMITTED:
        pytest.skip(f"no other user can be given this checkout: {done.stderr}")
    return done


def main() -> None:
    scratch, *command = sys.argv[1:]
    os.chown(scratch, UID, UID)
    try:
        _check(_LIBC.unshare(_NEWNS), "mount namespace")
        _mount(None, "/", None, _RECURSIVE | _PRIVATE)
        _open_up([str(ROOT), sys.prefix, sys.base_prefix, scratch])
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_PERMITTED)
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)
    home = f"{scratch}/home"
    os.makedirs(home, exist_ok=True)
    own = dict(HOME=home, TMPDIR=scratch, USER="lockstep-test", LOGNAME="lockstep-test")
    own |= dict(PYTHONDONTWRITEBYTECODE="1", PYTEST_DEBUG_TEMPROOT=scratch, PYTHONPATH=str(ROOT))
    os.chdir(ROOT)
    os.execvpe(command[0], command, os.environ | own)


def _open_up(needed: list[str]) -> None:
    """Make each path reachable for others: replace each closed directory above one by its needed entries."""
    closed = sorted({place for path in needed for place in _closed(Path(path))}, key=lambda p: len(p.parts))
    for place in closed:
        if _is_open(place):  # made by an earlier turn
            continue
        kept = [Path(path) for path in needed if Path(path).is_relative_to(place)]
        # A path that is closed itself has all its entries bound.
        kept = [entry for path in kept for entry in (path.iterdir() if path in closed else (path,))]
        links = {path: os.readlink(path) for path in kept if path.is_symlink()}
        held = {path: os.open(path, os.O_PATH) for path in kept if path not in links}
        modes = {path: os.fstat(fd).st_mode for path, fd in held.items()}
        _mount("tmpfs", str(place), "tmpfs", 0)
        os.chmod(place, 0o755)
        for path, fd in held.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=True) if stat.S_ISDIR(modes[path]) else path.touch()
            _mount(f"/proc/self/fd/{fd}", str(path), None, _BIND | _RECURSIVE)
            os.close(fd)
        for path, target in links.items():
            path.symlink_to(target)


def _closed(path: Path) -> list[Path]:
    """Return the directories of a path, itself included, that others cannot enter."""
    mine = path.stat().st_uid == UID
    return [place for place in (*path.parents, *([] if mine else [path])) if not _is_open(place)]


def _is_open(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) & 0o005 == 0o005


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    encoded = [os.fsencode(text) if text is not None else None for text in (source, target, kind)]
    _check(_LIBC.mount(*encoded, ctypes.c_ulong(flags), None), f"mount of {source} on {target}")


if __name__ == "__main__":
    main()
