"""Containers with each runtime of this machine: what programs in them can reach, and what they leave."""

import json
import os
import re
import shutil
import subprocess
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from rl.config.container import Container as Settings
from rl.config.container import read_container
from rl.features.containers.container import RUNTIMES, ContainerImage, ProgramLimits, RunningContainer
from rl.features.containers.environment import ContainerEnvironment
from rl.features.containers.image_store import unpack
from rl.rewards.code import score
from tests.container_image import build_image

INSTALLED = [runtime.name for runtime in RUNTIMES if shutil.which(runtime.program)]
SMALL = ProgramLimits(wall_s=20, memory_mib=512, disk_mib=48, files=500, tasks=24, output_bytes=10_000)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return build_image(tmp_path_factory.mktemp("image") / "root")


@pytest.fixture(params=INSTALLED or [pytest.param("", marks=pytest.mark.skip(reason="no runtime"))])
def runtime(request, image):
    try:
        RunningContainer(ContainerImage(str(image)), runtime=request.param).close()
    except ValueError as error:
        pytest.skip(str(error))
    return request.param


HOSTILE = {
    "the parent's environment": ("open('/proc/1/environ').read()", "PermissionError"),
    "the parent's files": ("import os; os.listdir('/proc/1/root')", "PermissionError"),
    "kills its parent": ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    "a socket": ("import socket; socket.create_connection(('192.0.2.1', 80), 9)", "unreachable"),
    "an abstract socket": (
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0lockstep-test')",
        "ConnectionRefusedError",
    ),
    "forks without end": ("import os\nwhile True: os.fork()", "limit tasks|BlockingIOError"),
    "fills the disk": (
        "f = open('/app/x', 'wb')\nfor _ in range(99): f.write(bytes(1 << 20))",
        "No space left",
    ),
    "fills shared memory": (
        "f = open('/dev/shm/x', 'wb')\nfor _ in range(99): f.write(bytes(1 << 20))",
        "No space left",
    ),
    "fills memory": ("x = bytearray(1 << 30)", "MemoryError"),
    "fills memory together": (
        "import os, time\nfor _ in range(3): os.fork()\nx = b'x' * (150 << 20); time.sleep(60)",
        "limit memory",
    ),
    "prints without end": ("while True: print('x' * 99)", "limit output"),
    "a device of the host": ("import os; os.chmod('/dev/null', 0)", "OSError"),
    "settings of the host": ("open('/proc/sys/kernel/core_pattern', 'w')", "OSError"),
    "mounts": (
        "import ctypes, os\nif ctypes.CDLL(None).unshare(0x10020000): raise PermissionError",
        "PermissionError",
    ),
}


@pytest.fixture
def container(runtime, image):
    with RunningContainer(ContainerImage(str(image)), runtime=runtime, limits=SMALL) as started:
        yield started


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_program_gets_an_error(container, attack):
    source, error = HOSTILE[attack]
    outcome = container.run(["python3", "-c", source], merge=True)
    assert not outcome.ok and re.search(error, f"{outcome.stdout} limit {outcome.end}"), outcome
    after = container.run(["/bin/sh", "-c", "echo alive; ps -e | grep -c python3"])
    assert after.stdout.startswith("alive"), after


HELD = """
import ctypes, mmap, os, socket, time
libc, mib = ctypes.CDLL(None), 1 << 20
def fill(memory, size):
    for at in range(0, size, 4096): memory[at] = 1
def stuff(*sockets):
    for one in sockets:
        one.setblocking(False)
        try:
            while True: one.send(bytes(65536))
        except BlockingIOError: pass
"""
KEEPS = {
    "a shared mapping": "x = mmap.mmap(-1, 300 * mib); fill(x, 300 * mib)",
    "a shared mapping filled by a process that ended": """
x = mmap.mmap(-1, 300 * mib)
if os.fork() == 0: fill(x, 300 * mib); os._exit(0)
os.wait()""",
    "a shared mapping of a device": """
x = mmap.mmap(os.open('/dev/zero', os.O_RDWR), 300 * mib); fill(x, 300 * mib)""",
    "many shared mappings": "x = [mmap.mmap(-1, mib) for _ in range(300)]; [fill(one, mib) for one in x]",
    "a shared segment": """
libc.shmat.restype = ctypes.c_void_p
n = libc.shmget(0, 300 * mib, 0o1600); p = libc.shmat(n, None, 0)
ctypes.memset(p, 1, 300 * mib); libc.shmdt(ctypes.c_void_p(p))""",
    "semaphores": "for _ in range(200): libc.semget(0, 30000, 0o1600)",
    "messages": """
m = (ctypes.c_char * 8008)(1)
for _ in range(20000):
    n = libc.msgget(0, 0o1600)
    libc.msgsnd(n, m, 8000, 0o4000); libc.msgsnd(n, m, 8000, 0o4000)""",
    "buffers of Unix sockets": """
x = [socket.socketpair() for _ in range(500)]
for pair in x: stuff(*pair)""",
    "buffers of TCP": """
l = socket.create_server(('127.0.0.1', 0)); x = []
for _ in range(300):
    x += (socket.create_connection(l.getsockname()), l.accept()[0]); stuff(*x[-2:])""",
    "page tables": """
x = mmap.mmap(-1, 1 << 38, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.PROT_READ)
x.madvise(15)
for at in range(0, 1 << 38, 1 << 21): x[at]""",
    "many small mappings": """
x, libc.mmap.restype = b"x" * (40 * mib), ctypes.c_void_p
for _ in range(6):
    if os.fork() == 0: break
at = libc.mmap(None, ctypes.c_size_t(1 << 28), 0, 0x22, -1, 0)
for place in range(at, at + (1 << 28), 8192): libc.mprotect(ctypes.c_void_p(place), 4096, 1)""",
    "locks of files": """
import fcntl
x, files = b'x' * (114 * mib), [open(f'/app/{n}', 'w') for n in range(40)]
for n in range(1200):  # each lock is compared with all locks of its file
    for file in files: fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * n)""",
    "watches of epoll": """
import select
x, watched = b'x' * (85 * mib), [os.eventfd(0) for _ in range(500)]
for one in (polls := [select.epoll() for _ in range(500)]): [one.register(fd) for fd in watched]""",
    "a process whose first thread has ended": """
import threading
def hold():
    time.sleep(0.5); x = mmap.mmap(-1, 300 * mib); fill(x, 300 * mib); time.sleep(300)
threading.Thread(target=hold).start(); libc.syscall(93 if os.uname().machine == 'aarch64' else 60, 0)""",
    "threads of which each ends soon": """
import threading
x = mmap.mmap(-1, 300 * mib)
def hold(page):
    if page < 300 * mib:
        for at in range(page, page + mib, 4096): x[at] = 1
    while True:
        try: return threading.Thread(target=hold, args=(page + mib,), daemon=True).start()
        except RuntimeError: pass  # too many at once
threading.Thread(target=hold, args=(0,), daemon=True).start()
libc.syscall(93 if os.uname().machine == 'aarch64' else 60, 0)""",
    "watches of inotify": """
x, paths = b'x' * (114 * mib), [f'{at}/{f}'.encode() for at, _, fs in os.walk('/') for f in fs]
for fd in (libc.inotify_init1(0) for _ in range(16)):
    for path in paths: libc.inotify_add_watch(fd, path, 2)""",
}
REFUSED = {
    "a file in memory": ("os.memfd_create('x')", "OSError"),
    "pages of a mapping in a pipe": (
        "c = ctypes.CDLL(None, use_errno=True); c.vmsplice(os.pipe()[1], None, 0, 0); "
        "raise OSError(os.strerror(ctypes.get_errno()))",
        "not implemented",
    ),
    "threads with descriptors of their own": (
        "c = ctypes.CDLL(None, use_errno=True)\n"
        "stack = ctypes.addressof(keep := ctypes.create_string_buffer(1 << 16)) + (1 << 16)\n"
        "if c.clone(c.pause, ctypes.c_void_p(stack & ~15), 0x10900, None) < 0: "
        "raise OSError(os.strerror(ctypes.get_errno()))",
        "not permitted",
    ),
    "descriptors of its own after the start of a thread": (
        "c = ctypes.CDLL(None, use_errno=True)\n"
        "if c.syscall(436, 100, 200, 2) < 0: raise OSError(os.strerror(ctypes.get_errno()))",
        "not implemented",
    ),
    "asynchronous reads of which the node has a number": (
        "c = ctypes.CDLL(None, use_errno=True); x = ctypes.c_ulong(0)\n"
        "if c.syscall(0 if os.uname().machine == 'aarch64' else 206, 9, ctypes.byref(x)) < 0: "
        "raise OSError(os.strerror(ctypes.get_errno()))",
        "not implemented",
    ),
    "events of files, of groups that no limit counts": (
        "c = ctypes.CDLL(None, use_errno=True)\n"
        "if c.fanotify_init(0x200, 0) < 0: raise OSError(os.strerror(ctypes.get_errno()))",
        "not permitted",
    ),
    "queues of events": (
        "if min(libc.inotify_init1(0) for _ in range(100)) < 0: raise OSError('no more queues')",
        "no more queues",
    ),
    "timers": (
        "x = ctypes.create_string_buffer(64); n = 107 if os.uname().machine == 'aarch64' else 222\n"
        "if any(libc.syscall(n, 0, None, x) for _ in range(5000)): raise OSError('no more timers')",
        "no more timers",
    ),
    "its input": ("os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x')", "PermissionError"),
    "descriptors": ("[os.dup(0) for _ in range(5000)]", "Too many open files"),
    "sockets of the hypervisor": ("socket.socket(40, socket.SOCK_STREAM)", "not supported"),
    "sockets of the kernel's ciphers": (
        "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
        "not supported",
    ),
}


@pytest.mark.parametrize("kept", KEEPS)
def test_memory_counts_wherever_the_node_holds_it(runtime, image, kept):
    limits = ProgramLimits(wall_s=200, memory_mib=128, disk_mib=8, files=100, tasks=8, output_bytes=10_000)
    with RunningContainer(ContainerImage(str(image)), runtime=runtime, limits=limits) as small:
        outcome = small.run(["python3", "-c", f"{HELD}{KEEPS[kept]}\ntime.sleep(300)"], merge=True)
        assert outcome.end == "memory", outcome
        assert small.run(["sh", "-c", "echo alive"]).stdout == "alive\n"


@pytest.mark.parametrize("way", REFUSED)
def test_a_container_is_refused_what_no_limit_counts(container, way):
    source, error = REFUSED[way]
    outcome = container.run(["python3", "-c", HELD + source], merge=True)
    assert not outcome.ok and error in outcome.stdout, outcome


def test_commands_stay_on_their_processors(runtime, image):
    every = sorted(os.sched_getaffinity(0))
    source = f"import os; print(len(os.sched_getaffinity(0))); os.sched_setaffinity(0, {every})"
    with RunningContainer(ContainerImage(str(image)), runtime=runtime, cpus=1) as limited:
        outcome = limited.run(["python3", "-c", source])
    assert outcome.stdout == "1\n" and "PermissionError" in outcome.stderr


def processes_of(pid):
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def test_twenty_at_a_time_see_nothing_of_each_other_and_leave_nothing(runtime, image, tmp_path):
    secret = tmp_path / "run" / "secret"
    secret.parent.mkdir()
    secret.write_text("the run's")
    mounts = Path("/proc/self/mountinfo").read_text()
    source = (
        "import os, sys, time\n"
        "open('/tmp/' + sys.argv[1], 'w').write('mine'); open('/dev/shm/' + sys.argv[1], 'w')\n"
        "if os.fork() == 0:\n    os.setsid(); os.close(1); os.close(2); time.sleep(600)\n"
        "time.sleep(0.5)\n"
        "print(os.listdir('/tmp'), os.listdir('/dev/shm'), os.path.exists(sys.argv[2]), 'KEY' in os.environ)"
    )
    limits = ProgramLimits(wall_s=60, memory_mib=256, disk_mib=8, files=100, tasks=8, output_bytes=1000)

    def trajectory(number):
        container = RunningContainer(ContainerImage(str(image)), runtime=runtime, limits=limits)
        arguments = ["python3", "-c", source, f"t{number}", str(secret)]
        return container, container.run(arguments, merge=True)

    with ThreadPoolExecutor(20) as pool:
        ended = list(pool.map(trajectory, range(20)))
    for number, (_, outcome) in enumerate(ended):
        assert outcome.stdout == f"['t{number}'] ['t{number}'] False False\n", outcome
    pids = [pid for container, _ in ended for pid in processes_of(container._process.pid)]
    assert len(pids) >= 60  # the starter, process 1 and the daemon of each
    for container, _ in ended:
        container.close()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert not {f"t{n}" for n in range(20)} & set(os.listdir("/dev/shm")) and list(tmp_path.iterdir()) == [
        secret.parent
    ]
    assert not (image / "tmp").exists()


def test_the_end_of_the_caller_ends_the_container(runtime, image):
    code = (
        "import os, sys\nfrom rl.features.containers.container import *\n"
        f"c = RunningContainer(ContainerImage({str(image)!r}), runtime={runtime!r})\n"
        "c.run(['sh', '-c', 'sleep 600 >/dev/null 2>&1 &']); print(c._process.pid, flush=True); input()"
    )
    caller = subprocess.Popen(
        [shutil.which("python"), "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    pids = processes_of(int(caller.stdout.readline()))
    assert len(pids) >= 3
    caller.kill()
    caller.communicate()
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left


def test_links_of_an_image_lead_to_no_place_outside(runtime, image, tmp_path):
    shutil.copytree(image, tmp_path / "root", symlinks=True)
    (tmp_path / "victim").mkdir()
    for name in ("etc", "tmp", "dev", "proc", "sys"):
        shutil.rmtree(tmp_path / "root" / name, ignore_errors=True)
        (tmp_path / "root" / name).symlink_to(tmp_path / "victim")
    with RunningContainer(ContainerImage(str(tmp_path / "root")), runtime=runtime) as started:
        assert started.run(["sh", "-c", "ls /etc; echo x > /tmp/x"]).ok
    assert list((tmp_path / "victim").iterdir()) == []


def test_renewal_leaves_no_file_and_no_process(container):
    container.run(["sh", "-c", "echo x > /app/x; echo x > /tmp/x; sleep 600 >/dev/null 2>&1 &"])
    assert "sleep" in container.run(["ps", "-e"]).stdout
    container.renew()
    assert container.run(["ls", "/app", "/tmp"]).stdout == "/app:\n\n/tmp:\n"
    assert "sleep" not in container.run(["ps", "-e"]).stdout


def test_the_environment_has_tools_and_a_score(runtime, image):
    settings = asdict(Settings(image=str(image), runtime=runtime, reuse=2))
    environment = ContainerEnvironment(
        container=settings,
        directory="/work",
        test="cat /work/result >/work/reward",
        reward_file="/work/reward",
    )
    for _ in range(3):  # the second one uses the process of the first one again
        environment.reset({"prompt": "do it", "extra_info": {}})
        assert environment.bash("ls /work; false") == "[exit status 1]"
        assert environment.write("/work/a b/x", "text\n") == "5 characters were written to /work/a b/x"
        assert environment.read("/work/a b/x") == "text\n"
        with pytest.raises(ValueError, match="No such file"):
            environment.read("/work/none")
        assert environment.score()["score"] == 0.0
        environment.write("/work/result", '{"reward": 0.5, "parts": 2}')
        assert environment.score().items() >= {"score": 0.5, "parts": 2.0, "acc": 0.0}.items()
        environment.close()


def test_the_code_reward_runs_in_an_image(runtime, image):
    container = {"image": str(image), "runtime": runtime}
    truth = {"inputs": ["1\n", "2\n"], "outputs": ["2", "3"]}
    right = score("", "```python\nprint(int(input()) + 1)\n```", truth, container=container)
    wrong = score("", "```python\nimport os; print(os.listdir('/work'))\n```", truth, container=container)
    assert right["acc"] == 1.0 and wrong["acc"] == 0.0
    call = {"fn_name": "f", "inputs": [[1]], "outputs": [2]}
    assert score("", "def f(x): return x + 1", call, container=container)["acc"] == 1.0
    test, wrong = "assert f(1) == 2 and f([3]) == [4]", "def f(x): return x if type(x) is int else [4]"
    right = "def f(x): return x + 1 if type(x) is int else [x[0] + 1]"
    reads = (
        "import json, os\nread = json.load(open(f'/proc/{os.getppid()}/fd/0'))\n"
        "os.write(os.open(f'/proc/{os.getppid()}/fd/1', os.O_WRONLY), read['token'].encode())\n"
    )
    for program, expected in (right, 1.0), (wrong, 0.0), (reads + right, 0.0):
        assert score("", program, test, container=container)["acc"] == expected, program


@pytest.mark.parametrize("bad", [{}, {"image": "x", "memory": 1}, {"image": "x", "tasks": 0}, {"image": 3}])
def test_bad_settings_name_their_key(bad):
    with pytest.raises(ValueError, match=r"^reward\.kwargs\.container"):
        read_container(bad, key="reward.kwargs.container")


def test_an_archive_is_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_IMAGES", str(tmp_path))
    layers = {
        "1": {"bin/sh": "", "app/old": "old", "app/kept": "kept"},
        "2": {"app/.wh.old": "", "app/new": "new"},
    }
    blobs = tmp_path / "oci/blobs/sha256"
    blobs.mkdir(parents=True)
    for name, files in layers.items():
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        with tarfile.open(blobs / name, "w:gz") as layer:
            layer.add(tmp_path / name, ".")
    config = {"config": {"Env": ["A=b=c"], "WorkingDir": "/app"}}
    manifest = {"layers": [{"digest": f"sha256:{n}"} for n in layers], "config": {"digest": "sha256:config"}}
    (blobs / "config").write_text(json.dumps(config))
    (blobs / "manifest").write_text(json.dumps(manifest))
    index = {"manifests": [{"digest": "sha256:manifest"}]}
    (tmp_path / "oci/index.json").write_text(json.dumps(index))
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(tmp_path / "oci", ".")
    found = unpack(str(tmp_path / "image.tar"))
    assert (found.variables, found.directory) == ({"A": "b=c"}, "/app")
    assert {path.name for path in Path(found.root, "app").iterdir()} == {"kept", "new"}
    Path(found.root, "app/mark").touch()
    assert Path(unpack(str(tmp_path / "image.tar")).root, "app/mark").exists()
    assert Path(found.root).parents[1].stat().st_mode & 0o077 == 0


def test_a_squashfs_file_is_an_image(runtime, tmp_path, monkeypatch, image):
    if shutil.which("mksquashfs") is None:
        pytest.skip("mksquashfs is not installed")
    monkeypatch.setenv("LOCKSTEP_IMAGES", str(tmp_path))
    (tmp_path / "root/bin").mkdir(parents=True)
    (tmp_path / "root/bin/hello").write_text("hello")
    subprocess.run(["mksquashfs", tmp_path / "root", tmp_path / "x.sqfs", "-quiet"], check=True)
    sif = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0".ljust(8192, b"\0")
    (tmp_path / "x.sif").write_bytes(sif + (tmp_path / "x.sqfs").read_bytes())
    for name in ("x.sqfs", "x.sif"):
        assert Path(unpack(str(tmp_path / name)).root, "bin/hello").read_text() == "hello"
