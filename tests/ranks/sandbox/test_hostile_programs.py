"""Programs that try to escape their limits, their watcher, or their own result. See also test_sandbox.py.

As root the first two groups show less, because nothing is unreadable: test_as_ordinary_user.py repeats them.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rl.sandbox.sandbox import ProgramLimits, protections, run_program
from tests.ranks.sandbox.test_sandbox import processes_with, wait_until
from tests.spawn import ROOT

HELD = """
import ctypes, mmap, os, socket, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def write(name):
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    for _ in range(12):
        os.write(fd, bytes(1 << 20))
    return fd
"""


@pytest.fixture(autouse=True)
def _needs_protection(tmp_path, monkeypatch):
    found = protections()
    if not {"seccomp", "landlock"} <= set(found.layers):
        pytest.skip(f"this machine lacks a layer: {found.reasons}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


REMOVAL = {
    "locked": "os.mkdir('x', 0)",
    "locked below a locked one": "os.makedirs('a/b/c'); os.mkdir('a/b/c/d', 0o100); os.mkdir('a/e', 0o300)",
    "by umask": "os.umask(0o777); os.mkdir('x')",
    "full and unreadable": "os.makedirs('x/y'); os.mkdir('x/z', 0o300); open('x/z/file', 'w')",
    "names of the removal": "[os.mkdir(f'.moved-{os.getppid()}-{i}', 0) for i in range(9)]",
    "odd names": "[os.makedirs(name * 25 + '/x', 0) for name in ('\\n', '\\udcff', ' ')]",
    "deep and locked": "[(os.mkdir('d', 0o300), os.chdir('d')) for _ in range(300)]",
    "a pipe, and deeper than a path is long": "os.mkfifo('x'); "
    "[(os.mkdir('d' * 20), os.chdir('d' * 20)) for _ in range(600)]; open('file', 'w').write('x')",
    "links": "os.symlink('/etc', 'etc'); os.symlink('.', 'here'); os.mkdir('x', 0); os.symlink('x', 'y')",
}


@pytest.mark.parametrize("tree", REMOVAL.values(), ids=REMOVAL)
def test_no_tree_makes_a_result_a_failure(tree, tmp_path):
    """An OSError would leave the sample out, so that a policy could erase its bad samples."""
    outcome = run_program(f"import os\n{tree}\nprint('made')")
    assert outcome.end == "disk" or (outcome.ok and outcome.stdout == "made\n"), outcome
    assert list(tmp_path.iterdir()) == [] and os.path.isdir("/etc")


FILLED = {
    "unlinked": "kept.append(write('x')); os.unlink('x')",
    "in a directory that cannot be listed": "os.mkdir(f'd{i}', 0o300); write(f'd{i}/x')",
    "mapped and closed": "fd = write('x'); os.unlink('x'); libc.mmap(0, 1, 1, 1, fd, 0); os.close(fd)",
    "in the table of a thread": """
def hold():
    libc.unshare(0x400)
    fd = write('x')
    os.unlink('x')
    time.sleep(60)
threading.Thread(target=hold).start(); time.sleep(0.2)""",
    "mapped beside an ended first thread": """
def fill():
    for _ in range(4):
        fd = write('x'); os.unlink('x'); libc.mmap(0, 1, 1, 1, fd, 0); os.close(fd)
    time.sleep(60)
threading.Thread(target=fill).start(); libc.pthread_exit(0)""",
    "sent to itself": """
a, b = socket.socketpair()
kept += [a, b]
fd = write('x'); os.unlink('x')
socket.send_fds(a, [b'x'], [fd]); os.close(fd)""",
}


@pytest.mark.parametrize("way", FILLED.values(), ids=FILLED)
def test_hidden_files_count(way, tmp_path):
    """Each way would hold 48 MiB beside a limit of 16."""
    loop = "".join(f"    {line}\n" for line in way.strip().splitlines())
    outcome = run_program(
        f"{HELD}kept = []\nfor i in range(4):\n{loop}time.sleep(60)", limits=ProgramLimits(wall_s=9)
    )
    assert outcome.end == "disk" or "PermissionError" in outcome.stderr, outcome
    assert list(tmp_path.iterdir()) == []


def test_a_file_may_be_allocated_up_to_the_largest_size():
    source = f"{HELD}end = libc.fallocate64(write('x'), 1, 0, ctypes.c_long(1 << 30))\n"
    source += "print(end, os.stat('x').st_blocks >> 11)"
    assert run_program(source).stdout == "-1 12\n"
    source = f"{HELD}os.posix_fallocate(write('x'), 0, 14 << 20)\nprint(os.path.getsize('x') >> 20)"
    assert run_program(source).stdout == "14\n"


def test_namespaces_bound_the_directory_by_themselves(tmp_path):
    source = f"{HELD}kept = []\nfor i in range(4):\n    kept.append(write('x')); os.unlink('x')"
    try:
        outcome = run_program(source, layers=("namespaces",))
    except OSError as error:
        pytest.skip(str(error))
    assert (outcome.end, outcome.code) == ("exit", 1) and "No space left" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_program_dies_with_its_killed_watcher(tmp_path):
    source = (
        "import ctypes, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nopen('tried', 'w')\ntime.sleep(100)"
    )
    code = f"from rl.sandbox.sandbox import run_program\nrun_program({source!r})"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: list(tmp_path.glob("*/box/tried")))
        (program,) = processes_with(f"{tmp_path}/lockstep-code-")
        watcher = int(Path(f"/proc/{program}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(watcher, signal.SIGKILL)
        _, errors = caller.communicate(timeout=60)
    finally:
        caller.kill()
        caller.wait()
    assert b"watcher process failed" in errors
    wait_until(lambda: not processes_with(f"{tmp_path}/lockstep-code-"))
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_user_cannot_be_watched():
    source = f"""
import ctypes, fcntl, json, os
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.inotify_init1(0)
ends = [fd, libc.inotify_add_watch(fd, {str(ROOT).encode()!r}, 0x3FF), libc.inotify_init()]
try:
    fcntl.fcntl(os.open(".", os.O_RDONLY), fcntl.F_NOTIFY, 1)
except OSError:
    ends.append(-1)
print(json.dumps(ends))
"""
    assert json.loads(run_program(source).stdout) == [-1, -1, -1, -1]
