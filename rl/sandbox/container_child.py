"""Script started by `container.Container`: hold one rootless container, and run commands in it.

    python -I -S container_child.py      JSON lines on standard input, one answer per line on standard output

The first line is the job of `Container`, answered by {} or {"error": text}. Then {"arguments": [...], ...}
runs a command, answered by the fields of an `Outcome`. {"renew": true} replaces the container by a fresh one,
{"seal": true} keeps its files as they are for tests, {"restore": {...}} shows tests these files, and
{"end": true} ends every process.

    this process                 waits for its child
      `- process 1               of new user, PID, mount, IPC, UTS and (unless asked) network namespaces
           `- runtime            bwrap, ch-run or apptainer: makes a user and a mount namespace with the image
           `- command            a fork of process 1 that enters these two and drops every right there

The image is the lower layer of an overlay whose upper layer is in a tmpfs of limited size, so writes vanish
with the mount namespace. A seal puts a new upper layer over what was written so far. The runtime is started
once with a command that only waits, and commands enter the namespaces that it made: this costs less than
another start, and no command has a moment with rights. When standard input closes, process 1 ends, and with
it every process and mount. It ignores signals from inside, and nothing inside may read its memory, files or
environment, because it is in an outer user namespace.

It imports only the standard library, because `-I` finds no package and a start must take milliseconds. See
user_namespaces(7), pid_namespaces(7), mount_namespaces(7) and Documentation/filesystems/overlayfs.rst.
"""

import base64
import contextlib
import ctypes
import fcntl
import json
import os
import platform
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out

import child
import container_memory

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWNET = 0x20000, 0x04000000, 0x08000000, 0x10000000, 0x40000000
_NOSUID, _NODEV, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_OPENAT2, _NO_MAGIC_LINKS, _NO_LINKS, _IN_ROOT = 437, 2, 4, 16
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
_READ_ONLY = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
"""Parts of /proc that belong to the machine; root of the host could write to them."""
_OWN = {"dev", "proc", "sys", "tmp"}
"""Directories of the root whose changes are nobody's answer."""
_FOR_TESTS_MIB, _FOR_TESTS_FILES = 16, 1000
"""Additional space and files for tests, in case the container is full."""
START_S = 60.0
"""Limit of a runtime's start, in seconds."""


def _setns(fd: int, kind: int) -> None:
    child.check(child.LIBC.setns(fd, kind), "setns")


def _make(path: str, text: str | None = None) -> None:
    """Make a directory, or a file with `text`, unless it exists."""
    if not os.path.lexists(path):
        if text is None:
            os.makedirs(path)
        else:
            with open(path, "w") as file:
                file.write(text)


def overlay(top: str, name: str, lower: list[int]) -> str:
    """Mount directories, the uppermost first, below a new one for writes in `top`; return their root."""
    for part in ("upper", "work", "root", "shm"):
        os.makedirs(f"{top}/{name}/{part}")
    root, upper = f"{top}/{name}/root", f"upperdir={top}/{name}/upper,workdir={top}/{name}/work,userxattr"
    layers = ":".join(f"/proc/self/fd/{fd}" for fd in lower)  # a path may hold colons or commas
    child._mount("overlay", root, "overlay", _NOSUID | _NODEV, f"lowerdir={layers},{upper}")
    return root


def build(job: dict[str, Any], image: int) -> str:
    """Mount everything in this mount namespace; return the root of the container."""
    top, limits = job["scratch"], job["limits"]
    size = f"mode=755,size={limits['disk_mib']}m,nr_inodes={limits['files']}"
    child._mount("tmpfs", top, "tmpfs", _NOSUID | _NODEV, size)
    os.mkdir(f"{top}/dev")
    root = overlay(top, "first", [image])
    for name in ("dev", "proc", "sys", "tmp", "etc"):  # a runtime needs these in the image
        if os.path.islink(f"{root}/{name}"):  # outside the container the link would lead out of the image
            os.unlink(f"{root}/{name}")
        _make(f"{root}/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        _make(f"{root}/etc/{name}", "")
    # What a runtime takes over from the host: none of it holds anything of the host.
    child._mount("tmpfs", f"{top}/dev", "tmpfs", _NOSUID, "mode=755,size=1m,nr_inodes=64")
    for name in _DEVICES:
        _make(f"{top}/dev/{name}", "")
        child._mount(f"/dev/{name}", f"{top}/dev/{name}", None, _BIND)
        child._set_read_only(f"{top}/dev/{name}", 0)  # root could change its mode; writes to it still work
    for name, target in _LINKS.items():
        os.symlink(target, f"{top}/dev/{name}")
    for name in ("pts", "shm", "mqueue"):
        os.mkdir(f"{top}/dev/{name}")
    child._set_read_only(f"{top}/dev", 0)  # its links, such as /dev/stdout, are for the tests too
    child._mount("devpts", f"{top}/dev/pts", "devpts", _NOSUID, "newinstance,ptmxmode=0666,mode=620,max=64")
    child._mount(f"{top}/dev", "/dev", None, _BIND | _RECURSIVE)
    for path in filter(os.path.exists, ("/etc/hosts", "/etc/resolv.conf")):
        with open(path) as file:
            _make(f"{top}/{os.path.basename(path)}", file.read())
        child._mount(f"{top}/{os.path.basename(path)}", path, None, _BIND)
        child._set_read_only(path, 0)
    child._mount("proc", "/proc", "proc", _NOSUID | _NODEV)
    for path in filter(os.path.exists, _READ_ONLY):
        child._mount(path, path, None, _BIND | _RECURSIVE)
        child._set_read_only(path, 0x8000)
    child._mount("tmpfs", "/sys", "tmpfs", _NOSUID | _NODEV, "size=0,nr_inodes=1,mode=555")
    child._set_read_only("/sys", 0)
    return root


# ---- what tests see ----


class Root:
    """A root directory of untrusted files; no path or link leads out of it."""

    def __init__(self, path: str, held: contextlib.ExitStack):
        self.path, self._held = path, held
        self._fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        held.callback(os.close, self._fd)

    def open(self, path: str, *, through_links: bool = False) -> int | None:
        """Open a path with O_PATH until the end of `held`; None if there is none; openat2(2)."""
        resolve = _IN_ROOT | _NO_MAGIC_LINKS | (0 if through_links else _NO_LINKS)
        how = ctypes.c_char_p(struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, resolve))
        while True:
            try:
                fd = child.syscall(_OPENAT2, path, self._fd, ctypes.c_char_p(os.fsencode(path)), how, 24)
            except BlockingIOError:  # something on this machine was renamed meanwhile
                continue
            except OSError:
                return None
            self._held.callback(os.close, fd)
            return fd

    def real(self, path: str) -> str:
        """Return a path without links; of one that does not exist, the part that does is without links."""
        if (fd := self.open(path, through_links=True)) is not None:
            return os.readlink(f"/proc/self/fd/{fd}").removeprefix(self.path) or "/"
        parent, name = os.path.split(os.path.normpath(path))
        return os.path.join(self.real(parent), name)

    def show(self, shown: int | None, path: str) -> None:
        """Bind an opened file or directory to a path without links; anything else removes what is there."""
        parts, at = [part for part in path.split("/") if part], self.path
        kind = stat.S_IFMT(os.fstat(shown).st_mode) if shown is not None else 0
        for number, part in enumerate(parts, 1):
            at, wanted = f"{at}/{part}", kind if number == len(parts) else stat.S_IFDIR
            found = stat.S_IFMT(os.lstat(at).st_mode) if os.path.lexists(at) else None
            if found is not None and found != wanted:
                child.remove_directory(at) if found == stat.S_IFDIR else os.unlink(at)
            if wanted not in (stat.S_IFDIR, stat.S_IFREG):
                return
            if found != wanted:
                _make(at, "" if wanted == stat.S_IFREG else None)
        child._mount(f"/proc/self/fd/{shown}", at, None, _BIND | _RECURSIVE)


def show_tests(sealed: Root, left: Root, changes: Root, request: dict[str, Any]) -> dict[str, list[str]]:
    """Show below `sealed`, at the paths `kept`, what commands left there; see `Container.restore`.

    changes: the files that commands wrote.
    """
    kept = sorted({sealed.real(path) for path in request["kept"]} - {"/"})

    def is_kept(path: str) -> bool:
        return any(f"{path}/".startswith(f"{place}/") for place in kept)

    programs, protected = [], {sealed.real(path) for path in request["protected"]}
    for entry in request["programs"]:
        at = sealed.real(entry)
        place = os.path.dirname(at) if os.path.basename(at) == "bin" else at
        if place not in kept:
            programs.append(entry)
            protected.add(place)
    shown = {path: sealed.open(path) for path in sorted(protected) if is_kept(path)}
    for path in kept:
        sealed.show(left.open(path), path)
    for path, fd in shown.items():
        sealed.show(fd, path)
    above = {path.split("/")[1] for path in kept} | _OWN
    unseen = [f"/{name}" for name in os.listdir(changes.path) if name not in above]
    unseen += [path for path in shown if changes.open(path) is not None]
    return {"unseen": unseen, "programs": programs}


def raise_loopback() -> None:
    """Switch the loopback device of a new network namespace on, for servers inside the container."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def pids() -> list[int]:
    """Return the processes of this PID namespace but process 1, which calls this."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and name != "1"]


class ProcessOne:
    """Process 1 of the container."""

    def __init__(self, job: dict[str, Any]):
        self._job, self._limits = job, job["limits"]
        calls = job["denied_calls"], job["missing_calls"]
        self._filter = child.container_filter(platform.machine(), *calls)
        child.prctl(child._PR_SET_PDEATHSIG, "parent-death signal", int(signal.SIGKILL))
        child.check(child.LIBC.unshare(_NEWNS), "mount namespace")
        child._mount(None, "/", None, _PRIVATE | _RECURSIVE)
        self._base = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._inside: list[tuple[int, int]] = []
        """Descriptors of the namespaces that commands enter, each with its kind."""
        self._lower: list[int] = []
        """Descriptors of the image and of sealed layers, the uppermost first."""
        self._root = ""
        """Root of the overlay in which commands run."""
        self._buffer = bytearray()
        self._ended_between = ""
        """Limit that processes exceeded while no command ran."""

    def renew(self) -> None:
        """Replace the container: no process, file, mount or object of the last one stays."""
        self.kill_all()
        self._leave()
        for fd in self._lower:
            os.close(fd)
        self._ended_between = ""
        _setns(self._base, _NEWNS)
        kinds = _NEWNS | _NEWIPC | _NEWUTS | (0 if self._job["network"] else _NEWNET)
        child.check(child.LIBC.unshare(kinds), "namespaces")
        os.chdir("/")
        self._lower = [os.open(self._job["image"], os.O_PATH | os.O_CLOEXEC)]
        self._root = build(self._job, self._lower[0])
        self._add_layer()
        if not self._job["network"]:
            raise_loopback()
        self._start_runtime(self._root)

    def _leave(self) -> None:
        """Close, and thereby end, the namespaces that commands entered."""
        for fd, _ in self._inside:
            os.close(fd)
        self._inside = []

    def seal(self) -> None:
        """Keep the files as they are, and put a new layer over them for later writes."""
        self.kill_all()
        self._leave()
        self._add_layer()
        self._start_runtime(self._root)

    def _add_layer(self) -> None:
        """Put a new upper layer over what was written so far."""
        upper = os.path.dirname(self._root) + "/upper"
        self._lower.insert(0, os.open(upper, os.O_PATH | os.O_CLOEXEC))
        self._root = overlay(self._job["scratch"], f"layer{len(self._lower)}", self._lower)

    def restore(self, request: dict[str, Any]) -> dict[str, list[str]]:
        """End every process and show tests the sealed files; see `Container.restore`."""
        self.kill_all()
        self._leave()
        top, limits = self._job["scratch"], self._limits
        size = f"size={limits['disk_mib'] + _FOR_TESTS_MIB}m,nr_inodes={limits['files'] + _FOR_TESTS_FILES}"
        child._mount(None, top, None, _REMOUNT | _NOSUID | _NODEV, f"mode=755,{size}")
        child.check(child.LIBC.unshare(_NEWIPC), "IPC namespace")
        left, self._root = self._root, overlay(top, f"tests{time.monotonic_ns()}", self._lower)
        with contextlib.ExitStack() as held:
            roots = self._root, left, os.path.dirname(left) + "/upper"
            answer = show_tests(*(Root(root, held) for root in roots), request)
        self._start_runtime(self._root)
        return answer

    def _start_runtime(self, root: str) -> None:
        """Run the runtime with a command that waits, and open the namespaces that it made."""
        for source, target in ((f"{root}/tmp", "/tmp"), (os.path.dirname(root) + "/shm", "/dev/shm")):
            os.chmod(source, 0o1777)
            child._mount(source, target, None, _BIND | _RECURSIVE)
        arguments = [part.replace("{root}", root) for part in self._job["runtime"]]
        (lines, out), (given, held) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            for target, fd in enumerate((given, out, out)):
                os.dup2(fd, target)
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
        for name, kind in (("mnt", _NEWNS), ("user", _NEWUSER)):  # in this order: the second one takes rights
            fd = os.open(f"/proc/{waiting}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            self._inside.append((fd, kind))
        os.close(held)
        os.close(lines)
        self.kill_all()

    # ---- commands ----

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a command until it ends or something exceeds a limit, which ends every process."""
        limits, begin = self._limits | request["limits"], time.monotonic()
        note, self._ended_between = self._ended_between, ""
        try:
            pid, pipes = self._fork(request)
        except OSError as error:
            return dict(end="exit", code=127, stdout="", stderr=str(error), seconds=0.0, note=note)
        output = {fd: bytearray() for fd in pipes}
        poll = select.poll()
        poll.register(0, 0)  # its end
        for fd in pipes:
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
        open_pipes, next_count, end, status = set(pipes), begin, "", None
        while not end and status is None:
            for fd, _ in poll.poll(20 if open_pipes else 5):
                if fd == 0:
                    os._exit(0)
                if not child._collect(fd, output[fd], limits["output_bytes"]):
                    poll.unregister(fd)
                    open_pipes.discard(fd)
            status, now = self.reap(pid), time.monotonic()
            if any(len(data) > limits["output_bytes"] for data in output.values()):
                end = "output"
            elif now - begin > limits["wall_s"]:
                end = "time"
            elif now >= next_count:
                next_count = now + child.COUNT_EVERY_S
                end = self.excess(limits)
        if end:
            self.kill_all()
        for fd in open_pipes:
            if not end:
                child._collect(fd, output[fd], limits["output_bytes"])
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
        """Start a command; return its pid and the reading ends of its output. Raises OSError if it cannot."""
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
        os.nice(5)  # process 1 must have its turn beside them
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
        child.set_limits(wanted)
        child.drop_capabilities()
        child.prctl(child._PR_SET_NO_NEW_PRIVS, "no_new_privs", 1)
        child.apply_seccomp(self._filter)
        os.chdir(request["directory"])
        os.execvpe(request["arguments"][0], request["arguments"], request["environment"])

    def excess(self, limits: dict[str, Any]) -> str:
        """Return the limit that the container's processes exceed together; "" if there is none."""
        found = pids()
        if len(found) > limits["tasks"]:  # without a look at each, because they may be many
            return "tasks"
        tasks = 0
        for pid in found:
            with contextlib.suppress(OSError):  # it has ended
                tasks += len(os.listdir(f"/proc/{pid}/task"))
        if tasks > limits["tasks"]:
            return "tasks"
        limit = limits["memory_mib"] << 20
        return "memory" if container_memory.held_bytes(found, limit, self._job["network"]) > limit else ""

    def reap(self, wanted: int) -> int | None:
        """Collect ended processes; return the wait status of `wanted` if it is among them."""
        status = None
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == wanted:
                    status = found[1]
        return status

    def kill_all(self) -> None:
        """Kill every other process of the PID namespace, which the kernel does at once, and collect them."""
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
        """Wait for a request, and meanwhile watch what earlier commands left in the background."""
        while b"\n" not in self._buffer:
            self.reap(0)
            is_busy = bool(self._inside) and bool(pids())
            if not select.select([0], [], [], child.COUNT_EVERY_S if is_busy else None)[0]:
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
        child.enter_user_namespace()
    except OSError as error:
        return answer({"error": str(error), "is_refused": True})
    pid = os.fork()
    if pid:
        os.close(0)
        os.close(1)
        os.waitpid(pid, 0)
        return
    try:
        # Nothing inside may look at it, although the kernel's rule for user namespaces forbids it already.
        child.prctl(child._PR_SET_DUMPABLE, "dumpable", 0)
        one = ProcessOne(job)
        one.renew()
    except (OSError, ValueError) as error:
        answer({"error": str(error)})
        os._exit(1)
    answer({})
    one.serve()


if __name__ == "__main__":
    main()
