"""A worker process: a supervisor and its child, the host, which runs users' code.

    training process --control socket--> supervisor        runs no user code
                    \\---work socket----> `- host           its fork: imports and calls users' code
                                            `- ...         processes that they start

Two processes, because the host can be blocked, stopped or dead when it must be killed with its descendants.
The supervisor is a child subreaper (prctl(2)): a descendant that loses its parent becomes the supervisor's
child and can be found. The supervisor kills all descendants when the training process closes the control
socket or ends, and exits after the host has ended. Its only regular child is the host; any other is an
orphan (see `Supervisor.sweep`).

On the control socket the training process sends SWEEP and receives JSON lines {"swept": true} and
{"ended": reason}. On the work socket it sends pickles. It receives JSON lines, because it must not unpickle
data that user code could have written.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SWEEP = b"s"
MARK = "LOCKSTEP_WORKER"
"""Environment variable that identifies a worker's processes if the supervisor was killed."""
KILLING_S = 10.0
"""Seconds for killing all descendants; a process in an uninterruptible wait may outlast it."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def run_worker(serve: Callable[[socket.socket, dict[str, Any]], None]) -> None:
    """Become the supervisor, and call `serve(work socket, options)` in the host. Does not return."""
    options = json.loads(sys.argv[1])
    work, control = (socket.socket(fileno=options[name]) for name in ("work", "control"))
    for connection in (work, control):
        connection.set_inheritable(False)  # programs that users' code starts must not inherit them
    with contextlib.suppress(OSError):  # the job's CPUs have changed since: keep the parent's
        os.sched_setaffinity(0, options["cpus"])
    supervisor = Supervisor(control, parent=options["parent"])
    pid = os.getpid()
    host = os.fork()
    if host == 0:
        try:
            supervisor.reset_in_host()
            confine(memory_mib=options["memory_mib"], supervisor=pid)
            serve(work, options)
        finally:
            os._exit(1)  # the supervisor's code must not run here
    work.close()
    sys.exit(supervisor.watch(host))


class Supervisor:
    """Kills all descendants of this process when the host or the training process ends."""

    def __init__(self, control: socket.socket, *, parent: int):
        """Set this process's signal handlers. `parent` is the pid of the training process."""
        self._control, self._parent = control, parent
        self._host = 0
        self._ended: str | None = None
        self._wakeups, self._wakeup_end = socket.socketpair()
        self._wakeup_end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        # Slurm may send these to every process of a step. Only the training process acts on them, and it may
        # still score the step's samples: pre-emption begins with SIGTERM and a grace period.
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(ignored, signal.SIG_IGN)
        for noted in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(noted, lambda number, frame: None)  # its number arrives at the wake-up socket
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        # Not SIGKILL, because the signal is also sent when only the thread that started this process ends.
        # The socket alone does not suffice: a fork of the training process may hold a copy of its end.
        _prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def reset_in_host(self) -> None:
        """Undo the supervisor's setup in the forked host."""
        signal.set_wakeup_fd(-1)
        for noted in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(noted, signal.SIG_DFL)
        # The host ignores SIGTERM, but its children must not: users' code may end them with it.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        for connection in (self._control, self._wakeups, self._wakeup_end):
            connection.close()

    def watch(self, host: int) -> int:
        """Wait until the host or the training process ends; return 0 if no descendant is left, else 1."""
        self._host = host
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wakeups, select.POLLIN)
        connected = True
        while connected and self._ended is None and os.getppid() == self._parent:
            for fd, _ in poller.poll():
                if fd == self._control.fileno():
                    connected = self._serve_request() and connected
                else:
                    self._wakeups.recv(4096)
            self._reap()
        cleared = self._kill_all()
        if self._ended is not None:
            self._send({"ended": self._ended})
        return 0 if cleared else 1

    def sweep(self) -> None:
        """Kill the orphans and their descendants; descendants of the host, such as a process pool, stay."""
        processes = all_processes()
        kept = {self._host, *descendants(self._host, processes)}
        for pid in descendants(os.getpid(), processes):
            if pid not in kept:
                _kill(pid)

    def _serve_request(self) -> bool:
        """Serve a request of the pool; return False if the pool has closed the socket."""
        try:
            request = self._control.recv(4096)
        except ConnectionResetError:
            request = b""
        if SWEEP in request:
            self.sweep()
            self._send({"swept": True})
        return bool(request)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the pool has ended; `watch` notices it
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _reap(self) -> bool:
        """Collect the exit status of ended children; return False if there are no children left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._host:
                code = os.waitstatus_to_exitcode(status)
                self._ended = f"exit status {code}" if code >= 0 else signal_name(-code)

    def _kill_all(self) -> bool:
        """Kill and reap all descendants; return False if some are left after KILLING_S."""
        poller = select.poll()
        poller.register(self._wakeups, select.POLLIN)
        deadline = time.monotonic() + KILLING_S
        # Repeated, because a process can fork after /proc was read and before it is killed.
        while self._reap() and time.monotonic() < deadline:
            processes = all_processes()
            found = descendants(os.getpid(), processes)
            # Groups are killed atomically, so that a process that forks continuously cannot escape. They have
            # no members elsewhere: a group belongs to one session, and every session but ours was created by
            # a descendant. kill(-1) would signal every process.
            for group in {processes[pid].group for pid in found} - {os.getpgid(0), 0, 1}:
                _kill(-group)
            for pid in found:
                _kill(pid)
            for _ in poller.poll(20):  # ms, or until a SIGCHLD
                self._wakeups.recv(4096)
        return not self._reap()


def confine(*, memory_mib: int, supervisor: int) -> None:
    """Limit this process, which will run user code; its children inherit all limits but the death signal."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    os.setsid()  # kill(0, ...) does not reach the supervisor
    os.nice(5)
    with contextlib.suppress(OSError):  # no writable /proc: the kernel then chooses its victim by itself
        Path("/proc/self/oom_score_adj").write_text("1000")
    lower_limit(resource.RLIMIT_CORE, 0)  # a core dump per crash would fill the disk
    if memory_mib:
        lower_limit(resource.RLIMIT_AS, memory_mib << 20)


def lower_limit(kind: int, limit: int) -> None:
    """Set the soft and hard limit to `limit`, or to the current hard limit if that is lower."""
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def signal_name(number: int) -> str:
    names = {s.value: s.name for s in signal.Signals}
    return names.get(number, f"signal {number}")  # real-time signals have no name


# ---- processes ----


class ProcessParent(NamedTuple):
    """Parent and process group of a process."""

    parent: int
    group: int


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def all_processes() -> dict[int, ProcessParent]:
    """Return all processes by pid, from /proc/*/stat (not every kernel has /proc/<pid>/task/*/children)."""
    processes = {}
    for pid in _pids():
        with contextlib.suppress(OSError):  # it may have ended
            # pid (name) state parent group ...; the name may hold spaces and parentheses
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            processes[pid] = ProcessParent(int(fields[1]), int(fields[2]))
    return processes


def descendants(root: int, processes: Mapping[int, ProcessParent]) -> list[int]:
    """Return all descendants of `root`, parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:  # grows during the iteration
        found += children.get(pid, ())
    return found


def kill_marked(mark: str) -> None:
    """Kill the processes of this user with MARK=mark in their environment, for at most KILLING_S."""
    entry = f"{MARK}={mark}".encode()
    deadline = time.monotonic() + KILLING_S
    while found := [pid for pid in _pids() if entry in _environment(pid)]:
        for pid in found:
            _kill(pid)
        if time.monotonic() > deadline:
            return


def _environment(pid: int) -> list[bytes]:
    """Return the environment of a process; empty for a zombie or another user's process."""
    try:
        return Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _kill(pid: int) -> None:
    """Kill the process `pid`, or the process group -pid."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; or a set-uid program
        os.kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
