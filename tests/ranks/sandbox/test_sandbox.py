"""Programs that attempt forbidden actions. The tests need no root, and root is confined too."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rl.sandbox import sandbox
from rl.sandbox.kernel import seccomp_filter
from rl.sandbox.sandbox import LAYERS, ProgramLimits, Protections, protections, run_program
from tests.spawn import ROOT
from tests.tables import cells

# The layers in use here, and what is used where seccomp or Landlock is missing.
CONFINED = [pytest.param(None, id="default"), pytest.param(("namespaces",), id="namespaces")]


@pytest.fixture(autouse=True, scope="module")
def _needs_protection():
    found = protections()
    if not (found.network and found.files):
        pytest.skip(f"this machine confines nothing: {found.reasons}")


@pytest.fixture(autouse=True)
def _own_directory(tmp_path, monkeypatch):
    """Keep the programs' directories apart from directories of tests that run beside this one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def layers(request):
    if request.param is not None:
        try:
            run_program("", layers=request.param)
        except OSError as error:
            pytest.skip(str(error))
    return request.param


def ends(*attempts, layers=None, limits=None):
    """Run a program of several statements; return how each ended: `done` or the name of the exception."""
    program = f"""
import os, json, socket
ends = []
for attempt in {attempts!r}:
    try:
        exec(attempt)
        ends.append("done")
    except BaseException as error:
        ends.append(type(error).__name__)
print(json.dumps(ends))
"""
    outcome = run_program(program, layers=layers, limits=limits)
    assert outcome.ok, outcome
    return json.loads(outcome.stdout)


def processes_with(text):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize("layers", CONFINED, indirect=True)
def test_input_output_errors_and_status(layers, tmp_path):
    source = "import sys\nprint(int(input()) + 1)\nprint('h\\u00e4', file=sys.stderr)\nsys.exit(3)"
    outcome = run_program(source, stdin="41\n", layers=layers)
    assert (outcome.end, outcome.code, outcome.stdout, outcome.stderr) == ("exit", 3, "42\n", "h\u00e4\n")
    assert not outcome.ok and 0 < outcome.seconds < 5
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layers", CONFINED, indirect=True)
def test_common_library_features_work(layers):
    source = """
import asyncio, bisect, collections, decimal, fractions, functools, hashlib, heapq, itertools, json, math, os
import random, re, ssl, sqlite3, statistics, sys, tempfile, threading, time, zlib, zoneinfo
import concurrent.futures
sys.setrecursionlimit(100000)
threading.stack_size(1 << 27)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
results = []
thread = threading.Thread(target=lambda: results.append(depth(50000)))
thread.start(); thread.join()
threading.stack_size(0)
with concurrent.futures.ThreadPoolExecutor(4) as pool: results += pool.map(abs, [-1, -2])
async def later():
    await asyncio.sleep(0.01)
    return 3
results.append(asyncio.run(later()))
with open("notes.txt", "w") as file: file.write("4")
results.append(int(open("notes.txt").read()))
with tempfile.TemporaryDirectory() as directory:
    os.rename("notes.txt", directory + "/b")
print(results, hashlib.sha256(b"a").hexdigest()[:4], open("/dev/urandom", "rb").read(1) is not None)
open("/dev/null", "w").write("a")
"""
    outcome = run_program(source, layers=layers)
    assert outcome.ok, outcome
    assert outcome.stdout == "[50000, 1, 2, 3, 4] ca97 True\n"


def test_environment_and_packages_are_not_inherited(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    source = "import os, sys\nprint(dict(os.environ), sys.path, sys.flags.isolated, os.listdir())"
    outcome = run_program(source)
    assert "secret" not in outcome.stdout and str(ROOT) not in outcome.stdout
    assert outcome.stdout.endswith("1 ['program.py']\n")


def test_another_interpreter_brings_its_packages():
    outcome = run_program("import numpy\nprint(numpy.arange(3).sum())", interpreter=sys.executable)
    assert (outcome.ok, outcome.stdout) == (True, "3\n"), outcome
    assert "ModuleNotFoundError" in run_program("import torch").stderr


def test_invalid_source_exits_with_status_1():
    for source in ("1 +", "\ud800", "print('" + "(" * 100_000):  # Python 3.11.2 ignores a zero byte
        outcome = run_program(source)
        assert outcome.end == "exit" and outcome.code == 1 and outcome.stdout == ""


@pytest.mark.parametrize("layers", CONFINED, indirect=True)
def test_files_outside_cannot_be_read_listed_or_run(layers, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    home = os.path.expanduser("~")
    paths = [str(secret), __file__, f"/proc/{os.getpid()}/environ"]
    paths += ["/etc/passwd", "/etc/shadow", "/proc/self/environ"]
    reads = ends(*[f"open({path!r}).read()" for path in paths], layers=layers)
    lists = ends(*[f"os.listdir({path!r})" for path in (home, "/tmp", "/proc", str(tmp_path))], layers=layers)
    denied = {"PermissionError", "FileNotFoundError"}
    assert set(reads) <= denied, dict(zip(paths, reads, strict=True))
    # In namespaces /tmp is a new one that holds the program's own directory and no more.
    assert set(lists[:1] + lists[2:]) <= (denied | ({"done"} if layers else set()))
    if layers:
        source = f"import os\nhome = os.path.exists({home!r}) and os.listdir({home!r})\n"
        listed = run_program(f"{source}print(len(os.listdir('../..')), home)", layers=layers).stdout
        assert listed.startswith("1 ") and not any(name in listed for name in ("secret", ".ssh")), listed
    assert ends("os.execv('/bin/cat', ['cat', '/etc/passwd'])", layers=layers)[0] in denied
    links = [f"os.symlink({str(secret)!r}, 'link'); open('link').read()", f"os.link({str(secret)!r}, 'hard')"]
    assert set(ends(*links, layers=layers)) <= denied | {"OSError"}


@pytest.mark.parametrize("layers", CONFINED, indirect=True)
def test_nothing_outside_its_directory_can_be_changed(layers, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("text")
    os.utime(victim, (1, 1))
    name, library = str(victim), os.path.realpath(json.__file__)
    before = {path: (os.stat(path).st_mode, os.stat(path).st_size) for path in (name, library)}
    new = str(tmp_path / "new"), "/etc/new-file", "/dev/shm/lockstep-new"
    changes = cells("""
        open({!r}, 'a') ;; os.truncate({!r}, 0) ;; os.open({!r}, os.O_RDONLY | os.O_TRUNC) ;;
        os.unlink({!r}) ;; os.rename({!r}, 'mine') ;; os.chmod({!r}, 0) ;; os.utime({!r}, (5, 5))
        """)
    attempts = [f"open({path!r}, 'w')" for path in new]
    attempts += [change.format(path) for path in (name, library) for change in changes]
    result = ends(*attempts, layers=layers)
    refused = {"PermissionError", "FileNotFoundError", "OSError"}
    assert set(result) <= refused, dict(zip(attempts, result, strict=True))
    assert {path: (os.stat(path).st_mode, os.stat(path).st_size) for path in (name, library)} == before
    assert os.stat(name).st_mtime == 1 and not any(os.path.exists(path) for path in new)


def test_files_are_limited_in_size_and_number():
    limits = ProgramLimits(disk_mib=4, files=100)
    assert ends("open('a', 'wb').write(bytes(10 << 20))", limits=limits) == ["OSError"]
    many = "import time\nfor i in range({n}):\n    open(str(i), 'wb').write(bytes({size}))\ntime.sleep(9)"
    assert run_program(many.format(n=200, size=1), limits=limits).end == "disk"
    assert run_program(many.format(n=9, size=1 << 20), limits=limits).end == "disk"


@pytest.mark.parametrize("layers", CONFINED, indirect=True)
def test_no_network(layers):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempts = [
            f"socket.create_connection(('127.0.0.1', {port}), 2)",
            "socket.create_connection(('1.1.1.1', 53), 2)",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'a', ('1.1.1.1', 53))",
            f"socket.create_connection(('::1', {port}), 2)",
            "socket.getaddrinfo('example.com', 80)",
        ]
        result = ends(*attempts, layers=layers)
        assert set(result) <= {"PermissionError", "OSError", "gaierror"}, result
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()


def test_no_unix_socket_of_another_process(tmp_path):
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(str(tmp_path / "socket"))
        abstract.bind(f"\0lockstep-{os.getpid()}")
        for listening in (server, abstract):
            listening.listen()
        result = ends(
            f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'socket')!r})",
            f"socket.socket(socket.AF_UNIX).connect('\\0lockstep-{os.getpid()}')",
            "socket.socket(socket.AF_NETLINK)",
            "socket.socketpair(socket.AF_INET)",
            "socket.socketpair()",
        )
    assert result == ["PermissionError"] * 4 + ["done"]


# ---- processes ----

SLEEPER = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
"""


def test_no_second_process_by_any_way():
    result = ends(
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.system('true') and 1 / 0",
        "__import__('subprocess').run(['/bin/true'])",
        "__import__('multiprocessing').Process(target=print).start()",
    )
    assert "done" not in result, result


@pytest.mark.parametrize("layers", [("namespaces",), ("landlock",), ()], ids=str, indirect=True)
def test_without_seccomp_forks_are_counted_and_orphans_killed(layers, tmp_path):
    # At most 40 processes, in case the limit fails.
    source = """
import os, time
for _ in range(40):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
time.sleep(600)
"""
    outcome = run_program(source, layers=layers, limits=ProgramLimits(tasks=20, wall_s=5))
    assert outcome.end == "tasks", outcome
    assert processes_with(f"{tmp_path}/lockstep-code-") == []
    outcome = run_program(SLEEPER, layers=layers)
    assert outcome.ok, outcome
    assert processes_with(f"{tmp_path}/lockstep-code-") == []


def test_threads_are_limited():
    start = "threading.Thread(target=time.sleep, args=(9,)).start()"
    source = f"import threading, time\nthreading.stack_size(1 << 16)\nfor _ in range(500): {start}"
    assert run_program(source, limits=ProgramLimits(tasks=20)).end == "tasks"


def test_signals_reach_only_the_program_itself():
    victim = subprocess.Popen(["sleep", "60"])
    try:
        # Signal 0 only tests whether a signal would be sent; SIGKILL is tried after that is refused.
        attempts = [f"os.kill({pid}, 0)" for pid in (-1, 1, victim.pid, -os.getpgid(victim.pid), os.getpid())]
        assert ends(*attempts) == ["PermissionError"] * len(attempts)
        attempts = [
            "os.kill(-1, 9)",
            f"os.kill({victim.pid}, 9)",
            "os.kill(os.getppid(), 9)",
            "os.killpg(os.getpgid(os.getppid()), 9)",
            f"os.pidfd_open({victim.pid})",
            f"import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, {victim.pid})",
            f"os.setpriority(os.PRIO_PROCESS, {victim.pid}, 19)",
            f"os.sched_setaffinity({victim.pid}, [0])",
            f"import resource; resource.prlimit({victim.pid}, resource.RLIMIT_CPU, (1, 1))",
        ]
        assert ends(*attempts) == ["PermissionError"] * len(attempts)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert run_program("import os\nos.abort()").code == -signal.SIGABRT
    assert run_program("import os\nos.kill(0, 9)").code == -signal.SIGKILL


def test_other_processes_and_privileges_are_denied():
    source = """
import ctypes, json, platform
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    return -ctypes.get_errno() if libc.syscall(number, *args) < 0 else 0
x86 = platform.machine() == "x86_64"
numbers = dict(ptrace=(101, 117), mount=(165, 40), bpf=(321, 280), keyctl=(250, 219), kexec_load=(246, 104),
               unshare=(272, 97), process_vm_readv=(310, 270), io_uring_setup=(425, 425), setns=(308, 268),
               memfd_create=(319, 279))
print(json.dumps({name: call(pair[0 if x86 else 1], 0, 0, 0, 0, 0, 0) for name, pair in numbers.items()}))
print(libc.prctl(39, 0, 0, 0, 0), libc.prctl(23, 21, 0, 0, 0))
"""
    outcome = run_program(source)
    first, second = outcome.stdout.splitlines()
    results = json.loads(first)
    assert results.pop("io_uring_setup") == -38  # ENOSYS
    assert set(results.values()) == {-1}, results  # EPERM
    # NO_NEW_PRIVS is set, and CAP_SYS_ADMIN is out of the bounding set where this process could take it out.
    assert second == ("1 0" if os.geteuid() == 0 else "1 1")


def test_limits_of_processor_time_and_wall_time():
    busy = run_program("while True: pass", limits=ProgramLimits(cpu_s=1, wall_s=20))
    assert busy.end == "time" and busy.seconds < 15
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run_program(stubborn, limits=ProgramLimits(cpu_s=1, wall_s=20)).code == -signal.SIGKILL
    sleep = "print('before', flush=True)\nimport time\ntime.sleep(60)"
    asleep = run_program(sleep, limits=ProgramLimits(wall_s=0.5))
    assert asleep.end == "time" and asleep.stdout == "before\n" and asleep.seconds < 5


def test_memory_is_limited():
    assert ends("bytearray(10 << 30)") == ["MemoryError"]
    outcome = run_program("a = []\nwhile True: a.append(bytearray(64 << 20))")
    assert outcome.code == 1 and "MemoryError" in outcome.stderr
    assert ends("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))")[0] == "ValueError"


def test_endless_output_is_cut_and_ends_the_program():
    for stream in ("stdout", "stderr"):
        source = f"import sys\nwhile True: sys.{stream}.write('a' * 9999)"
        outcome = run_program(source, limits=ProgramLimits(output_bytes=100_000))
        assert outcome.end == "output" and len(getattr(outcome, stream)) == 100_000 and outcome.seconds < 5
    whole = run_program("print('a' * 99_999)", limits=ProgramLimits(output_bytes=100_000))
    assert whole.ok and len(whole.stdout) == 100_000


def test_output_not_utf8_and_input_larger_than_a_pipe():
    assert run_program("import sys\nsys.stdout.buffer.write(b'\\xff')").stdout == "\ufffd"
    outcome = run_program("import sys\nprint(len(sys.stdin.read()))", stdin="a" * 3_000_000)
    assert outcome.stdout == "3000000\n"


def wait_until(condition, limit_s=60):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_caller_leaves_nothing_behind(tmp_path):
    code = "from rl.sandbox.sandbox import run_program\nrun_program('import time\\ntime.sleep(100)')"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment)
    try:
        wait_until(lambda: processes_with(f"{tmp_path}/lockstep-code-"))
    finally:
        caller.kill()
        caller.wait()
    wait_until(lambda: not processes_with(f"{tmp_path}/lockstep-code-") and not list(tmp_path.iterdir()))
    assert processes_with(f"{tmp_path}/lockstep-code-") == [] and list(tmp_path.iterdir()) == []


def test_an_interrupted_call_leaves_nothing_behind(tmp_path):
    class Late(Exception):
        pass

    def late(*_):
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(Late):
            run_program("import time\ntime.sleep(100)", limits=ProgramLimits(wall_s=30))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert list(tmp_path.iterdir()) == [] and processes_with(f"{tmp_path}/lockstep-code-") == []


def test_an_unprotected_machine_refuses_unless_allowed(monkeypatch):
    for network, files in ((False, True), (True, False)):
        found = Protections(layers=(), network=network, files=files, reasons={"landlock": "no such call"})
        monkeypatch.setattr(sandbox, "protections", lambda found=found: found)
        with pytest.raises(ValueError, match="landlock: no such call.*allow_unprotected=true"):
            run_program("print(1)")
        assert run_program("print(1)", allow_unprotected=True).stdout == "1\n"


def test_protections_are_probed():
    found = protections()
    assert set(found.layers) <= set(LAYERS) and found.layers
    assert not set(found.reasons) & set(found.layers)
    # The probe itself can fail: without a layer it reaches both.
    assert json.loads(run_program(sandbox._PROBE, layers=()).stdout) == {"network": False, "files": False}


def test_unknown_layers_limits_and_interpreters_are_refused():
    with pytest.raises(ValueError, match="unknown layers jail: choose among seccomp"):
        run_program("", layers=("jail",))
    with pytest.raises(ValueError, match="wall_s=0: a limit of a program must be positive"):
        ProgramLimits(wall_s=0)
    with pytest.raises(OSError):
        run_program("", interpreter="/nonexistent/python")


# ---- the filter, also of the machine that this one is not ----

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def decide(machine, number, *arguments, audit=None):
    """Interpret the filter for process 77 and return its verdict on a system call."""
    tables = sandbox._DENIED, sandbox.MISSING
    code = seccomp_filter(machine, 77, *(sandbox.call_numbers(table, machine) for table in tables))
    program = [struct.unpack_from("HBBI", code, at) for at in range(0, len(code), 8)]
    audit = audit or {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    padded = [a & 0xFFFFFFFFFFFFFFFF for a in (*arguments, 0, 0, 0, 0, 0, 0)[:6]]
    data = struct.pack("IIQ6Q", number, audit, 0, *padded)
    position = accumulator = 0
    while True:
        operation, if_true, if_false, k = program[position]
        position += 1
        if operation == 0x06:
            return k
        if operation == 0x20:
            accumulator = struct.unpack_from("I", data, k)[0]
            continue
        holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[operation]
        position += if_true if holds else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_on_both_machines(machine):
    def number(x86_64, aarch64):
        return x86_64 if machine == "x86_64" else aarch64

    thread, new_user = 0x00010000, 0x10000000
    clone, kill, tgkill, socketpair = number(56, 220), number(62, 129), number(234, 131), number(53, 199)
    read, execve, socket_ = number(0, 63), number(59, 221), number(41, 198)
    ptrace, mount = number(101, 117), number(165, 40)
    fcntl, ioctl, prlimit64 = number(72, 25), number(16, 29), number(302, 261)
    verdicts = {
        ALLOW: [(read,), (execve,), (clone, 0x3D0F00 | thread), (kill, 77), (kill, 0), (tgkill, 77, 80)],
        EPERM: [(socket_, 1), (ptrace,), (mount,), (clone, 17), (clone, thread | new_user), (kill, -1)],
        ENOSYS: [(435,), (425,)],  # clone3, io_uring_setup
    }
    # fcntl F_GETFL and F_SETOWN, ioctl TCGETS and TIOCSTI
    verdicts[ALLOW] += [(socketpair, 1), (fcntl, 0, 3), (ioctl, 0, 0x5401), (prlimit64, 0, 7)]
    verdicts[EPERM] += [(socketpair, 2), (fcntl, 0, 8), (ioctl, 0, 0x5412), (prlimit64, 78, 7)]
    verdicts[EPERM] += [(kill, -77), (kill, 78), (tgkill, 78, 78)]
    expected = {call: verdict for verdict, calls in verdicts.items() for call in calls}
    assert {call: decide(machine, *call) for call in expected} == expected
    # Another machine's calls, and the second set of numbers (x32) of this one.
    assert decide(machine, 0, audit=0x40000003) == KILL
    if machine == "x86_64":
        assert decide(machine, 0x40000000 + 41) == KILL
