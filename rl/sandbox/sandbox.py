"""Runs an untrusted program in its own confined process.

    run_program("print(int(input()) + 1)", stdin="41")  # Outcome(end="exit", code=0, stdout="42\\n", ...)

The program is Python. `python -I` runs it without the packages of this environment, with few environment
variables, in an empty directory that is removed afterwards. The program may read the interpreter and the
system's libraries, and write to its directory. It has one process with threads, no network, and limits on
time, memory, disk and output. This file declares what is allowed. child.py enforces it, and cleans up even if
this process is killed.

The sandbox has limits. It does not hide whether a path exists or how large it is, because Landlock does not
restrict stat. It does not bound the load on caches and memory bandwidth, and it does not protect against bugs
of the kernel. Without seccomp, a program can outlive a watcher that was killed. The sandbox protects against
accidents, and against tricks that a policy finds while it searches for reward, but not against somebody who
attacks the cluster.
"""

import contextlib
import functools
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.sandbox.leftovers import remove_directory

log = logging.getLogger(__name__)

LAYERS = ("seccomp", "landlock", "namespaces")

_CHILD = Path(__file__).with_name("child.py")
_GRACE_S = 20.0
"""Time beyond `wall_s`, in seconds, for starting two interpreters on a busy node and for cleaning up."""
_MACHINES = ("x86_64", "aarch64")

DENIED_EVERYWHERE = """\
# Namespaces and mounts.
unshare 272 97, setns 308 268
mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428, move_mount 429 429
fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442
open_tree_attr 467 467
# The kernel and the machine.
bpf 321 280, kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273
delete_module 176 106, reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 60
quotactl_fd 443 443, syslog 103 116, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266
adjtimex 159 171, sethostname 170 161, setdomainname 171 162, vhangup 153 58, iopl 172 -, ioperm 173 -
modify_ldt 154 -, personality 135 92, perf_event_open 298 241, userfaultfd 323 282
# The session's keys: Kerberos tickets and credentials of file systems.
keyctl 250 219, add_key 248 217, request_key 249 218
# Access to files without their path.
name_to_handle_at 303 264, open_by_handle_at 304 265
# A queue of events, which no limit counts.
fanotify_init 300 262"""
"""System calls that fail with EPERM in the sandbox and in containers. `call_numbers` describes the form."""
SET_AFFINITY = "sched_setaffinity 203 122"
MEMFD = "memfd_create 319 279, memfd_secret 447 447, vmsplice 278 75"
"""System calls for memory outside of mappings and files. Without them, programs use /dev/shm."""
_DENIED = f"""\
{DENIED_EVERYWHERE}
# Sockets of every family: AF_UNIX reaches munged, dockerd and D-Bus. Without a socket, bind, connect and the
# rest have no effect. socketpair stays allowed for AF_UNIX, because asyncio needs it.
socket 41 198
# Processes: the program is one process with threads (clone's flags are checked), so it leaves no descendants.
fork 57 -, vfork 58 -
# Signals to other processes (kill and tgkill are checked), and their priority and processors.
tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424
{SET_AFFINITY}, sched_setparam 142 118, sched_setscheduler 144 119, sched_setattr 314 274
setpriority 141 140, ioprio_set 251 30
# Memory and state of other processes.
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_open 434 434
pidfd_getfd 438 438, process_madvise 440 440, process_mrelease 448 448, migrate_pages 256 238
move_pages 279 239
# Memory and files that no limit counts: sendmsg can put descriptors of unlinked files into a socket.
{MEMFD}, sendmsg 46 211, sendmmsg 307 269
# Events of files that the program may not read, which Landlock does not restrict.
inotify_init 253 -, inotify_init1 294 26, inotify_add_watch 254 27
# Objects that outlive the process, and those of the user's other processes.
shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semtimedop 220 192, semctl 66 191
msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181
# Metadata: under Landlock a program could change that of every file of the user.
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -
fchownat 260 54, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15
fremovexattr 199 16, setxattrat 463 463, removexattrat 466 466, file_setattr 469 469, utime 132 -
utimes 235 -, futimesat 261 -, utimensat 280 88"""
"""System calls that fail with EPERM in the sandbox. `call_numbers` describes the form."""
MISSING = """\
clone3 435 435, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, io_setup 206 0"""
"""System calls that fail with ENOSYS, so that callers fall back to older calls.

The number of requests of io_setup is limited for all programs of a node together. io_uring opens sockets that
no filter sees. clone3 passes its flags behind a pointer, where no filter can read them.
"""

_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_SYSTEM = (*_LIBRARIES, "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/etc/ssl/openssl.cnf")

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
# A UDP connect sends nothing, and it fails if there is no route. /proc/self/status exists on every Linux.
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
class ProgramLimits:
    """Limits of one program. The defaults are generous for programming contests."""

    wall_s: float = 12.0
    """Seconds after which the program is killed."""
    cpu_s: int = 6
    """Seconds of processor time over all threads; LiveCodeBench allows 6."""
    memory_mib: int = 1024
    """Address space in MiB, including the stacks of threads (8 MiB each by default)."""
    disk_mib: int = 16
    """Maximum size of one file, and of all files together, in MiB. For one file it is enforced on write. For
    all files, including unlinked ones, it is checked every 50 ms; an unreadable directory counts as an
    excess. With namespaces, it is enforced on write for all files, too."""
    files: int = 1000
    """Maximum number of files and directories, checked every 50 ms."""
    tasks: int = 64
    """Maximum number of threads, and, without seccomp, of processes; checked every 50 ms."""
    output_bytes: int = 1_000_000
    """Maximum number of bytes of standard output, and of standard error. One byte more ends the program."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value!r}: a limit of a program must be positive.")


@dataclass(frozen=True)
class ProgramOutcome:
    """End of a program and its output."""

    end: str
    """How it ended: exit, signal (a crash, or the hard limit of processor time), or at a limit: time, output,
    tasks, disk."""
    code: int
    """Exit status. After a signal, minus the number of the signal, for example -11. 0 if the watcher ended it
    at a limit."""
    stdout: str
    stderr: str
    """Decoded as UTF-8 with replacement characters; truncated to `ProgramLimits.output_bytes`."""
    seconds: float
    """Wall time."""

    @property
    def ok(self) -> bool:
        """Whether it exited with status 0."""
        return self.end == "exit" and self.code == 0

    def report(self, output: str, limit: str) -> str:
        """Return an output, followed by how the program ended unless it ended with status 0.

        limit: text for an end at a limit.
        """
        ends = {"exit": f"exit status {self.code}", "signal": f"signal {-self.code}"}
        end = "" if self.ok else f"[{ends.get(self.end, limit)}]"
        return "\n".join(filter(None, (output, end))) or "[no output]"


@dataclass(frozen=True)
class Protections:
    """The layers that work on this machine. They are found by trying each of them."""

    layers: tuple[str, ...]
    """Layers of LAYERS that are used."""
    network: bool
    """Whether programs are kept from the network."""
    files: bool
    """Whether programs are kept from all files that they may not read or write."""
    reasons: dict[str, str]
    """Why each layer that was tried does not work."""


def run_program(
    source: str,
    *,
    stdin: str = "",
    limits: ProgramLimits | None = None,
    interpreter: str | None = None,
    layers: tuple[str, ...] | None = None,
    allow_unprotected: bool = False,
    pipes: tuple[int, ...] = (),
) -> ProgramOutcome:
    """Run the Python program `source` with `stdin` as its input. It adds about 60 ms to the time of the
    program.

    Args:
        source: the program; it need not compile.
        stdin: its standard input.
        limits: None for the defaults of `ProgramLimits`.
        interpreter: path of the Python that runs it, for example in a virtual environment with packages that
            it needs; None for this process's interpreter without its virtual environment.
        layers: layers of LAYERS to confine it with; None for `protections().layers`.
        allow_unprotected: run it even if nothing keeps it from the network or from files.
        pipes: further descriptors for the program, passed as its arguments; this process closes them.

    Raises:
        ValueError: `layers` is None, and network or files cannot be protected on this machine.
        OSError: the program could not be started or confined.
    """
    with contextlib.ExitStack() as held:
        for fd in pipes:
            held.callback(os.close, fd)
        if layers is None:
            found = protections()
            if not (found.network and found.files) and not allow_unprotected:
                raise ValueError(_describe_refusal(found))
            layers = found.layers
        limits = limits or ProgramLimits()
        job = _job(source, stdin, limits, interpreter or os.path.realpath(sys.executable), layers)
        watcher, held_end = _start_watcher(job, pipes)
    directory = job["directory"]
    try:
        line = json.dumps(job).encode() + b"\n"
        answer, errors = watcher.communicate(line, timeout=limits.wall_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        watcher.kill()  # the program is killed with it: PR_SET_PDEATHSIG in prctl(2), which seccomp protects
        raise OSError("the sandbox's watcher process did not answer and was killed") from None
    finally:
        # After an interruption, the watcher ends the program and itself as soon as one of these is closed.
        # They are closed before the wait, because it may be reading its job or writing its answer.
        os.close(held_end)
        for pipe in filter(None, (watcher.stdin, watcher.stdout, watcher.stderr)):
            pipe.close()
        watcher.wait()
        _remove_what_is_left(directory)
    if not answer:
        raise OSError(f"the sandbox's watcher process failed: {errors.decode(errors='replace')[-2000:]}")
    result = json.loads(answer)
    if "setup_error" in result:
        raise OSError(f"the program could not be confined and was not run: {result['setup_error']}")
    return ProgramOutcome(**result)


def _start_watcher(job: dict[str, Any], pipes: tuple[int, ...]) -> tuple[subprocess.Popen[bytes], int]:
    """Make the directory of a job and start its watcher. Return the process, and our end of its parent
    pipe."""
    own = os.path.realpath(sys.executable)
    job |= {"pipes": pipes}
    job["directory"] = directory = os.path.realpath(tempfile.mkdtemp(prefix="lockstep-code-"))
    # The watcher notices that this process has ended when the other end of this pipe is closed.
    parent_pipe, held_end = os.pipe()
    try:
        watcher = subprocess.Popen(
            [own, "-I", "-S", str(_CHILD), str(parent_pipe)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(_describe(own)),
            cwd="/",
            pass_fds=(parent_pipe, *pipes),
            start_new_session=True,
        )
    except OSError:
        os.close(held_end)
        os.rmdir(directory)
        raise
    finally:
        os.close(parent_pipe)
    return watcher, held_end


def _remove_what_is_left(directory: str) -> None:
    """Remove a program's directory if its watcher was killed or could not remove it. A failure is only
    logged."""
    try:
        if os.path.lexists(directory):
            remove_directory(directory)
    except OSError as error:
        log.warning("the directory of a program, %s, could not be removed: %s", directory, error)


@functools.cache
def protections() -> Protections:
    """Return the layers that work on this machine. They are tried once per process, which takes about 0.2 s.

    Namespaces are tried and used only if seccomp and Landlock together do not protect both network and files.
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
            reasons[layer] = f"a probe ended with {outcome.end} {outcome.code}: {outcome.stderr[-500:]}"
    return Protections(
        layers=tuple(working),
        network=any(found["network"] for found in working.values()),
        files=any(found["files"] for found in working.values()),
        reasons=reasons,
    )


def call_numbers(table: str, machine: str) -> list[int]:
    """Return the numbers of the system calls in a table for a machine.

    An entry of the table is `name x86_64 aarch64`: the name, and the number on each machine, or `-` for none.

    For example, "mq_open 240 180, utimes 235 -" gives [180] for aarch64.
    """
    lines = [line for line in table.splitlines() if not line.startswith("#")]
    numbers = [entry.split()[1 + _MACHINES.index(machine)] for entry in ",".join(lines).split(",")]
    return [int(number) for number in numbers if number != "-"]


def _describe_refusal(found: Protections) -> str:
    kept = {"the network": found.network, "the user's files": found.files}
    return (
        "programs are not run: nothing on this machine keeps them from "
        f"{' and '.join(name for name, protected in kept.items() if not protected)}. "
        f"({'; '.join(f'{layer}: {reason}' for layer, reason in found.reasons.items())}.) "
        "This needs seccomp and Landlock (Linux 6.2 with landlock in the list of security modules), or user "
        "namespaces for ordinary users (sysctl user.max_user_namespaces, "
        "kernel.apparmor_restrict_unprivileged_userns); in a container, a seccomp profile that permits them. "
        "To run the model's programs with your rights, set reward.kwargs.allow_unprotected=true."
    )


def _job(
    source: str, stdin: str, limits: ProgramLimits, interpreter: str, layers: tuple[str, ...]
) -> dict[str, Any]:
    """Return the job that child.py reads from its standard input."""
    unknown = set(layers) - set(LAYERS)
    if unknown:
        raise ValueError(f"unknown layers {', '.join(sorted(unknown))}: choose among {', '.join(LAYERS)}.")
    machine = platform.machine()
    if layers and machine not in _MACHINES:
        raise OSError(f"programs can be confined on {' and '.join(_MACHINES)}, this is {machine}")
    described = _describe(interpreter)
    return {
        "source": source,
        "stdin": stdin,
        # -B: no .pyc beside the standard library. utf8: input and output are UTF-8 in every locale.
        "arguments": [interpreter, "-I", "-B", "-X", "utf8"],
        "environment": _environment(described),
        "limits": asdict(limits),
        "layers": list(layers),
        "readable": _readable(interpreter, described),
        "devices": [device for device in _DEVICES if os.path.exists(device)],
        "denied_calls": call_numbers(_DENIED, machine) if layers else [],
        "missing_calls": call_numbers(MISSING, machine) if layers else [],
    }


@functools.cache
def _describe(interpreter: str) -> dict[str, list[str]]:
    """Return the places where an interpreter and its libraries are installed. Raises OSError if it does not
    run."""
    # Interpreters of environment modules may need the variable to start.
    environment = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    command = [interpreter, "-I", "-c", _DESCRIBE_INTERPRETER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"{interpreter} does not run: {done.stderr[-1000:]}")
    return json.loads(done.stdout)


def _environment(described: dict[str, list[str]]) -> dict[str, str]:
    """Return a program's variables, with LD_LIBRARY_PATH for libraries outside the system's directories."""
    directories = {os.path.dirname(library) for library in described["libraries"]}
    system = tuple(f"{directory}/" for directory in _LIBRARIES)
    extra = sorted(d for d in directories if not f"{d}/".startswith(system) and not d.endswith("lib-dynload"))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    variables = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **threads}
    return {**variables, "LD_LIBRARY_PATH": ":".join(extra)} if extra else variables


def _readable(interpreter: str, described: dict[str, list[str]]) -> list[str]:
    """Return paths that a program may read and execute, none inside another, parents first."""
    candidates = [*_SYSTEM, interpreter, *map(os.path.realpath, [interpreter, *described["libraries"]])]
    for prefix in described["prefixes"]:
        candidates += [f"{prefix}/lib", f"{prefix}/lib64", f"{prefix}/pyvenv.cfg"]
    chosen: list[str] = []
    for path in sorted(set(filter(os.path.exists, candidates))):
        if not any(path.startswith(f"{parent}/") for parent in chosen):
            chosen.append(path)
    return chosen
