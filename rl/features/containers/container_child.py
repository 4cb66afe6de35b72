"""Script started by `container.Container`: hold one rootless container, and run commands in it.

    python -I -S container_child.py      JSON lines on standard input, one answer per line on standard output

The first line is the job of `RunningContainer`, answered by {} or {"error": text}. Then
{"arguments": [...], ...} runs a command, answered by the fields of a `ProgramOutcome`. {"renew": true}
replaces the container by a fresh container, {"seal": true} keeps its present files for tests,
{"restore": {...}} shows tests these files, and {"end": true} ends every process.

    this process                 waits for its child
      `- process 1               of new user, PID, mount, IPC, UTS and (unless asked) network namespaces
           `- runtime            bwrap, ch-run or apptainer: makes a user and a mount namespace with the image
           `- command            a fork of process 1 that enters both namespaces and drops every right

The image is the lower layer of an overlay. The upper layer is in a tmpfs of limited size, so writes vanish
with the mount namespace. A seal puts a new upper layer over the files written so far. The runtime is started
once with a command that only waits. Each command enters the namespaces of the runtime: this costs less than
another start, and no command has a moment with rights. When standard input closes, process 1 ends, and with
it every process and mount. Process 1 ignores signals from inside. For example, `kill -9 1` in the container
has no effect. Nothing inside may read its memory, files or environment, because process 1 is in an outer user
namespace.

The script imports only the standard library, because `-I` finds no package and a start must take
milliseconds. See user_namespaces(7), pid_namespaces(7), mount_namespaces(7) and
Documentation/filesystems/overlayfs.rst.
"""

import base64
import contextlib
import fcntl
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [_HERE, os.path.join(_HERE, "../../sandbox")]  # -I leaves them out

import container_files  # noqa: E402
import container_memory  # noqa: E402
import kernel  # noqa: E402
import leftovers  # noqa: E402

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWNET = 0x20000, 0x04000000, 0x08000000, 0x10000000, 0x40000000
_FOR_TESTS_MIB, _FOR_TESTS_FILES = 16, 1000
"""Additional space in MiB, and additional files, for tests in a full container."""
COUNT_EVERY_S = 0.05
"""Seconds between counts of processes and memory."""
START_S = 60.0
"""Limit of a runtime's start, in seconds."""


def _setns(fd: int, kind: int) -> None:
    kernel.check(kernel.LIBC.setns(fd, kind), "setns")


def raise_loopback() -> None:
    """Switch the loopback device of a new network namespace on, for servers inside the container."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def pids() -> list[int]:
    """Return the processes of this PID namespace, except the caller, process 1."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and name != "1"]


class ProcessOne:
    """Process 1 of the container."""

    def __init__(self, job: dict[str, Any]):
        self._job, self._limits = job, job["limits"]
        calls = job["denied_calls"], job["missing_calls"]
        self._filter = kernel.container_filter(platform.machine(), *calls)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, "parent-death signal", int(signal.SIGKILL))
        with contextlib.suppress(OSError):  # some machines let nobody write to /proc/sys
            container_files.limit_watchers()
        kernel.check(kernel.LIBC.unshare(_NEWNS), "mount namespace")
        kernel.mount(None, "/", None, container_files.PRIVATE | container_files.RECURSIVE)
        self._base = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._inside: list[tuple[int, int]] = []
        """Descriptors of the namespaces that commands enter, each with its kind."""
        self._lower: list[int] = []
        """Descriptors of the image and of sealed layers, the uppermost layer first."""
        self._root = ""
        """Root of the overlay for commands."""
        self._buffer = bytearray()
        self._ended_between = ""
        """Limit that processes exceeded while no command ran."""

    def renew(self) -> None:
        """Replace the container: no process, file, mount or object of the last container stays."""
        self._leave()
        for fd in self._lower:
            os.close(fd)
        self._ended_between = ""
        _setns(self._base, _NEWNS)
        kinds = _NEWNS | _NEWIPC | _NEWUTS | (0 if self._job["network"] else _NEWNET)
        kernel.check(kernel.LIBC.unshare(kinds), "namespaces")
        os.chdir("/")
        self._lower = [os.open(self._job["image"], os.O_PATH | os.O_CLOEXEC)]
        self._root = container_files.build(self._job, self._lower[0])
        self._add_layer()
        if not self._job["network"]:
            raise_loopback()
        self._start_runtime(self._root)

    def _leave(self) -> None:
        """End every process, and close the namespaces of commands, which ends them."""
        self.kill_all()
        for fd, _ in self._inside:
            os.close(fd)
        self._inside = []

    def seal(self) -> None:
        """Keep the files as they are, and put a new layer over them for later writes."""
        self._leave()
        self._add_layer()
        self._start_runtime(self._root)

    def _add_layer(self) -> None:
        """Put a new upper layer over the files written so far."""
        upper = os.path.dirname(self._root) + "/upper"
        self._lower.insert(0, os.open(upper, os.O_PATH | os.O_CLOEXEC))
        self._root = container_files.overlay(self._job["scratch"], f"layer{len(self._lower)}", self._lower)

    def restore(self, request: dict[str, Any]) -> dict[str, list[str]]:
        """End every process and show tests the sealed files; see `RunningContainer.restore`."""
        self._leave()
        top, limits = self._job["scratch"], self._limits
        size = f"size={limits['disk_mib'] + _FOR_TESTS_MIB}m,nr_inodes={limits['files'] + _FOR_TESTS_FILES}"
        kernel.mount(
            None,
            top,
            None,
            container_files.REMOUNT | container_files.NOSUID | container_files.NODEV,
            f"mode=755,{size}",
        )
        kernel.check(kernel.LIBC.unshare(_NEWIPC), "IPC namespace")
        left, self._root = (
            self._root,
            container_files.overlay(top, f"tests{time.monotonic_ns()}", self._lower),
        )
        with contextlib.ExitStack() as held:
            roots = self._root, left, os.path.dirname(left) + "/upper"
            answer = container_files.show_tests(
                *(container_files.Root(root, held) for root in roots), request
            )
        self._start_runtime(self._root)
        return answer

    def _start_runtime(self, root: str) -> None:
        """Run the runtime with a command that waits, and open the namespaces that the runtime made."""
        for source, target in ((f"{root}/tmp", "/tmp"), (os.path.dirname(root) + "/shm", "/dev/shm")):
            os.chmod(source, 0o1777)
            kernel.mount(source, target, None, container_files.BIND | container_files.RECURSIVE)
        arguments = [part.replace("{root}", root) for part in self._job["runtime"]]
        (lines, out), (given, held) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            for number, fd in enumerate((given, out, out)):
                os.dup2(fd, number)
            os.closerange(3, 256)
            try:
                os.execve(arguments[0], arguments, self._job["runtime_environment"])
            except OSError as error:
                os.write(1, f"{arguments[0]}: {error}".encode())
            os._exit(1)
        os.close(out)
        os.close(given)
        text, deadline = b"", time.monotonic() + START_S
        while not text.endswith(b"ready\n"):
            if not select.select([lines], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise OSError(
                    f"{arguments[0]} was not ready within {START_S:g} s: {text.decode('utf-8', 'replace')}"
                )
            data = os.read(lines, 4096)
            if not data:
                raise OSError(f"{' '.join(arguments[:1])} failed: {text.decode('utf-8', 'replace')[-1500:]}")
            text += data
        own = os.readlink("/proc/self/ns/mnt")
        waiting = max(pid for pid in pids() if os.readlink(f"/proc/{pid}/ns/mnt") != own)
        for name, kind in (("mnt", _NEWNS), ("user", _NEWUSER)):  # in this order: "user" takes rights
            fd = os.open(f"/proc/{waiting}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            self._inside.append((fd, kind))
        os.close(held)
        os.close(lines)
        self.kill_all()

    # ---- commands ----

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a command to its end, or until a limit is exceeded; an exceeded limit ends every process."""
        limits, begin = self._limits | request["limits"], time.monotonic()
        note, self._ended_between = self._ended_between, ""
        try:
            pid, pipes = self._fork(request)
        except OSError as error:
            return dict(end="exit", code=127, stdout="", stderr=str(error), seconds=0.0, note=note)
        output = {fd: bytearray() for fd in pipes}
        poll = select.poll()
        poll.register(0, 0)  # the end of standard input
        for fd in pipes:
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
        open_pipes, next_count, end, status = set(pipes), begin, "", None
        while not end and status is None:
            for fd, _ in poll.poll(20 if open_pipes else 5):
                if fd == 0:
                    os._exit(0)
                if not leftovers.collect(fd, output[fd], limits["output_bytes"]):
                    poll.unregister(fd)
                    open_pipes.discard(fd)
            status, now = self.reap(pid), time.monotonic()
            if any(len(data) > limits["output_bytes"] for data in output.values()):
                end = "output"
            elif now - begin > limits["wall_s"]:
                end = "time"
            elif now >= next_count:
                next_count = now + COUNT_EVERY_S
                end = self.excess(limits)
        if end:
            self.kill_all()
        for fd in open_pipes:
            if not end:
                leftovers.collect(fd, output[fd], limits["output_bytes"])
        for fd in pipes:
            os.close(fd)
        code = 0 if end or status is None else os.waitstatus_to_exitcode(status)
        texts = [bytes(data[: limits["output_bytes"]]).decode("utf-8", "replace") for data in output.values()]
        return {
            "end": end or ("exit" if code >= 0 else "signal"),
            "code": code,
            "stdout": texts[0],
            "stderr": texts[1] if len(texts) == 2 else "",
            "seconds": time.monotonic() - begin,
            "note": note,
        }

    def _fork(self, request: dict[str, Any]) -> tuple[int, list[int]]:
        """Start a command; return its pid and the reading ends of its output. Raises OSError if the command
        cannot start."""
        stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(stdin, "wb", closefd=False) as file:
            file.write(base64.b64decode(request["stdin"]))
        fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        os.lseek(stdin, 0, os.SEEK_SET)
        (out, inner_out), (failure, failed) = os.pipe(), os.pipe()
        err, inner_err = (out, os.dup(inner_out)) if request["merge"] else os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(request, (stdin, inner_out, inner_err), failed)
            except BaseException as error:
                os.write(failed, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(127)
        for fd in (stdin, inner_out, inner_err, failed):
            os.close(fd)
        message = os.read(failure, 4096)  # b"": execve closed the other end
        os.close(failure)
        pipes = list(dict.fromkeys((out, err)))
        if message:
            for fd in pipes:
                os.close(fd)
            self.reap(0)
            raise OSError(message.decode())
        return pid, pipes

    def _become(self, request: dict[str, Any], fds: tuple[int, int, int], failed: int) -> NoReturn:
        """Enter the container's namespaces without rights, and execve the command."""
        os.setsid()
        os.nice(5)  # process 1 must have its turn beside the commands
        os.sched_setaffinity(0, self._job["cpus"])
        for fd, kind in self._inside:
            _setns(fd, kind)
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.dup2(failed, 3)
        os.set_inheritable(3, False)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, *child_signals()):
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        memory, tasks = self._limits["memory_mib"] << 20, self._limits["tasks"]
        wanted = {resource.RLIMIT_DATA: memory, resource.RLIMIT_NPROC: tasks, resource.RLIMIT_CORE: 0}
        wanted |= {resource.RLIMIT_NOFILE: container_memory.DESCRIPTORS, resource.RLIMIT_MSGQUEUE: 1 << 16}
        wanted[resource.RLIMIT_SIGPENDING] = container_memory.DESCRIPTORS  # timers count, too
        kernel.set_limits(wanted)
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, "no_new_privs", 1)
        kernel.apply_seccomp(self._filter)
        os.chdir(request["directory"])
        os.execvpe(request["arguments"][0], request["arguments"], request["environment"])

    def excess(self, limits: dict[str, Any]) -> str:
        """Return the limit that the container's processes exceed together; "" if there is none."""
        found = pids()
        if len(found) > limits["tasks"]:  # without reading each process, because there may be many
            return "tasks"
        tasks = 0
        for pid in found:
            with contextlib.suppress(OSError):  # the process has ended
                tasks += len(os.listdir(f"/proc/{pid}/task"))
        if tasks > limits["tasks"]:
            return "tasks"
        limit = limits["memory_mib"] << 20
        return "memory" if container_memory.held_bytes(found, limit, self._job["network"]) > limit else ""

    def reap(self, wanted: int) -> int | None:
        """Collect ended processes; return the wait status of `wanted`, or None if `wanted` has not ended."""
        status = None
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == wanted:
                    status = found[1]
        return status

    def kill_all(self) -> None:
        """Kill all other processes of the PID namespace, in one call of the kernel, and collect them."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    # ---- requests ----

    def serve(self) -> None:
        """Answer requests until standard input closes."""
        while True:
            request = self._next_request()
            try:
                answer(self._carry_out(request))
            except (OSError, ValueError) as error:
                answer({"error": str(error)})

    def _carry_out(self, request: dict[str, Any]) -> dict[str, Any]:
        if "arguments" in request:
            return self.run(request)
        if "restore" in request:
            return self.restore(request["restore"])
        {"renew": self.renew, "seal": self.seal, "end": self.kill_all}[next(iter(request))]()
        return {}

    def _next_request(self) -> dict[str, Any]:
        """Wait for a request, and meanwhile watch the processes that earlier commands left in the background.
        For example, a server started by `python -m http.server &` still counts against the limits."""
        while b"\n" not in self._buffer:
            self.reap(0)
            is_busy = bool(self._inside) and bool(pids())
            if not select.select([0], [], [], COUNT_EVERY_S if is_busy else None)[0]:
                if excess := self.excess(self._limits):
                    self.kill_all()
                    self._ended_between = excess
                continue
            data = os.read(0, 1 << 20)
            if not data:
                os._exit(0)
            self._buffer += data
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        return json.loads(line)


def child_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that this process ignores, because Slurm may send them to a whole step."""
    return signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


def answer(fields: dict[str, Any]) -> None:
    data = json.dumps(fields).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in child_signals():
        signal.signal(number, signal.SIG_IGN)
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 16)
        if not data:
            return
        line += data
    job = json.loads(line)
    try:
        kernel.enter_user_namespace()
    except OSError as error:
        return answer({"error": str(error), "is_refused": True})
    pid = os.fork()
    if pid:
        os.close(0)
        os.close(1)
        os.waitpid(pid, 0)
        return
    try:
        # Nothing inside may read this process. The kernel's rule for user namespaces forbids it already.
        kernel.prctl(kernel.PR_SET_DUMPABLE, "dumpable", 0)
        one = ProcessOne(job)
        one.renew()
    except (OSError, ValueError) as error:
        answer({"error": str(error)})
        os._exit(1)
    answer({})
    one.serve()


if __name__ == "__main__":
    main()
