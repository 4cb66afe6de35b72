"""Run a program that nobody has read, in a process of its own that can do little more than compute.

    outcome = run_program("print(int(input()) + 1)", stdin="41")      # Outcome(end="exit", code=0, stdout="42\\n", ...)

The program is Python, run by `python -I` without the packages of this environment, in an empty directory that is removed
afterwards, with an environment of a few variables. It may read the interpreter and the system's libraries and write its
directory. It has one process and some threads, no network, and limits of time, memory, disk and output. This file holds
what is allowed; `sandbox_child` carries it out, and ends and removes everything also if this process is killed meanwhile.

What it does not do: hide that a path exists or how large it is (Landlock leaves stat alone), bound the load on caches and
memory bandwidth, or withstand a hole in the kernel. It is made against what a policy finds while it looks for reward, and
against accidents, not against someone who attacks the cluster.
"""

import functools
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

LAYERS = ("seccomp", "landlock", "namespaces")

_CHILD = Path(__file__).with_name("child.py")
_GRACE_S = 20.0
"""Beyond the wall time: for the start of two interpreters on a busy node, and for the end."""

# System calls that fail with EPERM, by their numbers on x86_64 and aarch64 (None: there is none).
_DENIED = {
    # Sockets of every family: the credentials of munged, dockerd and D-Bus are behind AF_UNIX. Without a socket, bind,
    # connect and the rest have nothing to work on. socketpair stays (AF_UNIX only), asyncio needs it.
    "socket": (41, 198),
    # Processes: one, with threads (clone is checked by its flags). So a program has no descendants that could stay.
    "fork": (57, None),
    "vfork": (58, None),
    "unshare": (272, 97),
    "setns": (308, 268),
    # Signals to others (kill and tgkill are checked), and their priority and processors.
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    # The inside of other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # Mounts.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    # The kernel and the machine.
    "bpf": (321, 280),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    # The session's keys: Kerberos tickets and credentials of file systems.
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # Files by another way than their path, and memory that no limit counts.
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # What outlives the process, and what other processes of the user keep there.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # Metadata of files: under Landlock a program could change that of every file of the user, wherever it is.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
# ENOSYS sends a caller to the older call. io_uring opens sockets that no filter sees, and the flags of clone3 are behind a
# pointer, where no filter can look.
_MISSING = {
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}

_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/etc/ssl/openssl.cnf",
)

_DESCRIBE_INTERPRETER = """
import importlib, json, sys
for name in ("ssl", "sqlite3", "ctypes", "lzma", "bz2", "zlib", "decimal", "hashlib"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
mapped = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/" in line and ".so" in line}
print(json.dumps({"prefixes": [sys.prefix, sys.base_prefix], "libraries": sorted(mapped)}))
"""
# UDP connect sends nothing; it fails without a route. /proc/self/status exists on every Linux.
_PROBE = """
import json, socket
def blocked(action):
    try:
        action()
    except OSError:
        return True
    return False
network = blocked(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("127.0.0.1", 9)))
print(json.dumps({"network": network, "files": blocked(lambda: open("/proc/self/status"))}))
"""


@dataclass(frozen=True)
class Limits:
    """What one program may use. The defaults are wide for a program of a programming contest."""

    wall_s: float = 12.0
    """Seconds until it is killed, whatever it does."""
    cpu_s: int = 6
    """Seconds of processor time, over all threads; LiveCodeBench gives 6."""
    memory_mib: int = 1024
    """MiB of address space. The stacks of threads count: 8 MiB each, if the program asks for nothing else."""
    disk_mib: int = 16
    """MiB of one file (at once), and of all files together (looked at every 50 ms)."""
    files: int = 1000
    """Files and directories it may make, looked at every 50 ms."""
    tasks: int = 64
    """Threads, and processes where seccomp is missing, looked at every 50 ms."""
    output_bytes: int = 1_000_000
    """Bytes kept of standard output, and of standard error; one more ends the program."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"the limit {name} of a program must be positive, it is {value!r}.")


@dataclass(frozen=True)
class Outcome:
    """How a program ended and what it printed."""

    end: str
    """exit, signal (it crashed, or was ended by the hard limit of processor time), or the limit: time, output, tasks, disk."""
    code: int
    """Exit status; minus the signal's number if a signal ended it; 0 for the limits that are watched from outside."""
    stdout: str
    stderr: str
    """UTF-8, what is not is replaced; cut at Limits.output_bytes."""
    seconds: float
    """Wall time."""

    @property
    def ok(self) -> bool:
        """It ended by itself with status 0."""
        return self.end == "exit" and self.code == 0


@dataclass(frozen=True)
class Protections:
    """What this machine confines programs with, each found by trying."""

    layers: tuple[str, ...]
    """Those in use, of LAYERS."""
    network: bool
    """Programs cannot reach the network."""
    files: bool
    """Programs cannot read or write files but those they are given."""
    reasons: dict[str, str]
    """For each layer that was tried and does not work, why."""


def run_program(
    source: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    interpreter: str | None = None,
    layers: tuple[str, ...] | None = None,
    allow_unprotected: bool = False,
) -> Outcome:
    """Run the Python program `source` with `stdin` as its input. Takes about 60 ms beyond the program's own time.

    Args:
        source: the program; it need not compile.
        stdin: its standard input, a file.
        limits: None for the defaults of Limits.
        interpreter: path of the Python that runs it, which may be that of a virtual environment whose packages the program
            shall have. None for the one this process runs on, without its virtual environment.
        layers: those of LAYERS to confine it with; None for `protections().layers`.
        allow_unprotected: run it also if nothing here keeps it from the network or from files.

    Raises:
        ValueError: `layers` is None, and network or files cannot be protected on this machine.
        OSError: the program could not be started or confined.
    """
    if layers is None:
        found = protections()
        if not (found.network and found.files) and not allow_unprotected:
            raise ValueError(_refusal(found))
        layers = found.layers
    job = _job(
        source,
        stdin,
        limits or Limits(),
        os.path.realpath(interpreter or sys.executable),
        interpreter,
        layers,
    )
    own = _describe(os.path.realpath(sys.executable))
    environment = {**_environment(own), "TMPDIR": os.environ.get("TMPDIR", "")}
    reading, lifeline = os.pipe()
    try:
        watcher = subprocess.Popen(
            [os.path.realpath(sys.executable), "-I", "-S", str(_CHILD), str(reading)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            pass_fds=(reading,),
            start_new_session=True,
        )
    except OSError:
        os.close(lifeline)
        raise
    finally:
        os.close(reading)
    try:
        line = json.dumps(job).encode() + b"\n"
        answer, errors = watcher.communicate(line, timeout=job["limits"]["wall_s"] + _GRACE_S)
    except subprocess.TimeoutExpired:
        watcher.kill()  # the program dies with it, see PR_SET_PDEATHSIG in prctl(2)
        raise OSError(
            "the process that watches over the program does not answer; it has been killed"
        ) from None
    finally:
        # If this call was interrupted, the watcher sees one of these closed, ends the program and itself. It must not be
        # waited for before: it may be reading its job or writing its answer.
        os.close(lifeline)
        for pipe in (watcher.stdin, watcher.stdout, watcher.stderr):
            pipe.close()
        watcher.wait()
    return _outcome(answer, errors)


def _outcome(answer: bytes, errors: bytes) -> Outcome:
    if not answer:
        raise OSError(
            f"the process that watches over the program failed: {errors.decode(errors='replace')[-2000:]}"
        )
    result = json.loads(answer)
    if "setup_error" in result:
        raise OSError(f"the program could not be confined and was not run: {result['setup_error']}")
    return Outcome(**result)


@functools.cache
def protections() -> Protections:
    """Which layers work on this machine and what they protect; tried once per process, about 0.2 s.

    Namespaces are tried, and used, only where seccomp and Landlock together do not protect both network and files.
    """
    working: dict[str, dict[str, bool]] = {}
    reasons: dict[str, str] = {}
    for layer in LAYERS:
        enough = all(any(found[what] for found in working.values()) for what in ("network", "files"))
        if layer == "namespaces" and enough:
            break
        try:
            outcome = run_program(_PROBE, layers=(layer,))
        except OSError as error:
            reasons[layer] = str(error)
            continue
        if outcome.ok:
            working[layer] = json.loads(outcome.stdout)
        else:
            reasons[layer] = (
                f"a program under it ends with {outcome.end} {outcome.code}: {outcome.stderr[-500:]}"
            )
    return Protections(
        layers=tuple(working),
        network=any(found["network"] for found in working.values()),
        files=any(found["files"] for found in working.values()),
        reasons=reasons,
    )


def _refusal(found: Protections) -> str:
    missing = [
        name
        for name, there in (("the network", found.network), ("the user's files", found.files))
        if not there
    ]
    return (
        f"programs are not run: nothing on this machine keeps them from {' and '.join(missing)}. "
        f"({'; '.join(f'{layer}: {reason}' for layer, reason in found.reasons.items())}.) "
        "It takes seccomp and Landlock (Linux 6.2 with landlock in the list of security modules), or user namespaces that "
        "an ordinary user can make (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns); in a "
        "container, a seccomp profile that permits them. To run what the model writes with your rights nevertheless, set "
        "reward.kwargs.allow_unprotected=true."
    )


def _job(
    source: str, stdin: str, limits: Limits, real: str, interpreter: str | None, layers: tuple[str, ...]
) -> dict[str, object]:
    """What `sandbox_child` reads from its standard input."""
    unknown = set(layers) - set(LAYERS)
    if unknown:
        raise ValueError(f"unknown layers {', '.join(sorted(unknown))}: choose among {', '.join(LAYERS)}.")
    machine = platform.machine()
    column = {"x86_64": 0, "aarch64": 1}.get(machine)
    if column is None and layers:
        raise OSError(f"programs can be confined on x86_64 and aarch64, this is {machine}")
    path = interpreter or real
    described = _describe(path)
    return {
        "source": source,
        "stdin": stdin,
        # -B: no .pyc beside the standard library. utf8: whatever the locale, input and output are UTF-8.
        "arguments": [path, "-I", "-B", "-X", "utf8"],
        "environment": _environment(described),
        "limits": asdict(limits),
        "layers": list(layers),
        "readable": _readable(path, described),
        "devices": [device for device in _DEVICES if os.path.exists(device)],
        "denied_calls": [
            numbers[column]
            for numbers in _DENIED.values()
            if column is not None and numbers[column] is not None
        ],
        "missing_calls": [numbers[column] for numbers in _MISSING.values() if column is not None],
    }


@functools.cache
def _describe(interpreter: str) -> dict[str, list[str]]:
    """Where an interpreter and the shared libraries it loads are installed. OSError if it does not run."""
    # Interpreters of a cluster's modules may need the variable to start at all.
    environment = (
        {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]} if "LD_LIBRARY_PATH" in os.environ else {}
    )
    command = [interpreter, "-I", "-c", _DESCRIBE_INTERPRETER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"{interpreter} does not run: {done.stderr[-1000:]}")
    return json.loads(done.stdout)


def _environment(described: dict[str, list[str]]) -> dict[str, str]:
    """The few variables a program has. LD_LIBRARY_PATH only for an interpreter with libraries outside the system's places."""
    directories = {os.path.dirname(library) for library in described["libraries"]}
    prefixes = tuple(f"{place}/" for place in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"))
    extra = sorted(
        d for d in directories if not f"{d}/".startswith(prefixes) and not d.endswith("lib-dynload")
    )
    variables = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return {**variables, "LD_LIBRARY_PATH": ":".join(extra)} if extra else variables


def _readable(interpreter: str, described: dict[str, list[str]]) -> list[str]:
    """Paths that a program may read and execute, none inside another, parents first."""
    wanted = [
        *_SYSTEM,
        os.path.realpath(interpreter),
        interpreter,
        *map(os.path.realpath, described["libraries"]),
    ]
    for prefix in described["prefixes"]:
        wanted += [f"{prefix}/lib", f"{prefix}/lib64", f"{prefix}/pyvenv.cfg"]
    chosen: list[str] = []
    for path in sorted(set(filter(os.path.exists, wanted))):
        if not any(path.startswith(f"{parent}/") for parent in chosen):
            chosen.append(path)
    return chosen
