"""One worker of the scoring pool: a supervisor and its child, the scorer, which calls the reward functions.

    training process --control socket--> supervisor        python -m rl.rewards.pool.worker, runs no user code
                    \\---work socket----> `- scorer         its fork: imports and calls the reward functions
                                            `- ...         processes that they start

Two processes, because the scorer can be blocked, stopped or dead when it must be killed with its descendants.
The supervisor is a child subreaper (prctl(2)): a descendant that loses its parent becomes the supervisor's
child and can be found. The supervisor kills all descendants when the training process closes the control
socket or ends, and exits after the scorer has ended. Its only regular child is the scorer; any other is an
orphan (see `Supervisor.sweep`).

On the control socket the pool sends SWEEP and receives JSON lines {"swept": true} and {"ended": reason}. On
the work socket the pool sends pickles, first (plan, sys.path), then chunks [(index, sample), ...]. It
receives JSON lines, because it must not unpickle data that user code could have written:

    {"ready": is_async} or {"unloadable": sentence, "traceback": text}       once, after the import
    {"i": index, "values": {name: number}, "prediction": text or null}       a score
    {"i": index, "error": text, "last": bool}                                a failure; last: the scorer exits
    {"i": index, "waiting": true}                                            called, and now awaited
"""

import contextlib
import ctypes
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rl.rewards.mixture import Mixture
from rl.rewards.score import RejectedResult, Score, encodable

SWEEP = b"s"
MARK = "LOCKSTEP_SCORING_WORKER"
"""Environment variable that identifies a worker's processes if the supervisor was killed."""
MAX_LINE_BYTES = 1 << 20
MAX_ERROR_CHARS = 4000
KILLING_S = 10.0
"""Seconds for killing all descendants; a process in an uninterruptible wait may outlast it."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main() -> None:
    options = json.loads(sys.argv[1])
    work, control = (socket.socket(fileno=options[name]) for name in ("work", "control"))
    for connection in (work, control):
        connection.set_inheritable(False)  # programs that a reward function starts must not inherit them
    with contextlib.suppress(OSError):  # the job's CPUs have changed since: keep those of the parent
        os.sched_setaffinity(0, options["cpus"])
    supervisor = Supervisor(control, parent=options["parent"])
    pid = os.getpid()
    scorer = os.fork()
    if scorer == 0:
        try:
            supervisor.reset_in_scorer()
            confine(memory_mib=options["memory_mib"], supervisor=pid)
            Scorer(work, timeout_s=options["timeout_s"]).serve()
        finally:
            os._exit(1)  # the supervisor's code must not run here
    work.close()
    sys.exit(supervisor.watch(scorer))


class Supervisor:
    """Kills all descendants of this process when the scorer or the training process ends."""

    def __init__(self, control: socket.socket, *, parent: int):
        """Set this process's signal handlers. `parent` is the pid of the training process."""
        self._control, self._parent = control, parent
        self._scorer = 0
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

    def reset_in_scorer(self) -> None:
        """Undo the supervisor's setup in the forked scorer."""
        signal.set_wakeup_fd(-1)
        for noted in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(noted, signal.SIG_DFL)
        # The scorer ignores SIGTERM, but its children must not: a reward function may end them with it.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        for connection in (self._control, self._wakeups, self._wakeup_end):
            connection.close()

    def watch(self, scorer: int) -> int:
        """Wait until the scorer or the training process ends; return 0 if no descendant is left, else 1."""
        self._scorer = scorer
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
        """Kill the orphans and their descendants; descendants of the scorer, such as a process pool, stay."""
        processes = all_processes()
        kept = {self._scorer, *descendants(self._scorer, processes)}
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
            if pid == self._scorer:
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


class Scorer:
    """Calls the reward functions on the samples from the work socket and sends the results back."""

    def __init__(self, work: socket.socket, *, timeout_s: float):
        self._work, self._timeout_s = work, timeout_s
        self._pid = os.getpid()
        self._cwd = os.getcwd()
        self._runner = None

    def serve(self) -> None:
        """Score samples until the pool closes the socket."""
        stream = self._work.makefile("rb")
        plan, sys.path[:] = pickle.load(stream)
        try:
            mixture = Mixture(plan)
        except BaseException as error:  # an import runs user code, which may call exit()
            sentence = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return self._send(
                {"unloadable": encodable(sentence[:MAX_ERROR_CHARS]), "traceback": explain(error)}
            )
        self._send({"ready": mixture.is_async})
        while True:
            try:
                chunk = pickle.load(stream)
            except EOFError:
                return
            waiting = self._call(mixture, chunk)
            if waiting:
                self._await(waiting)
                self._restore_state()

    def _call(
        self, mixture: Mixture, chunk: Sequence[tuple[int, Mapping[str, Any]]]
    ) -> list[tuple[int, Awaitable[Score]]]:
        """Score the samples in order; return those that must be awaited."""
        waiting = []
        for index, sample in chunk:
            try:
                outcome = mixture.score(sample)
            except BaseException as error:
                self._fail(index, error)
            else:
                if isinstance(outcome, Score):
                    self._answer(index, outcome)
                else:
                    self._send({"i": index, "waiting": True})
                    waiting.append((index, outcome))
            self._restore_state()
        return waiting

    def _await(self, waiting: Sequence[tuple[int, Awaitable[Score]]]) -> None:
        """Await all concurrently, each with its own time limit, and answer each when it completes."""
        import asyncio  # imported here because it doubles the time that a worker needs to start

        async def settle(index: int, outcome: Awaitable[Score]) -> None:
            # Not wait_for, which runs the call in a separate task: all blocking calls would be answered last.
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    score = await outcome
            except BaseException as error:
                self._fail(index, TimeoutError(too_slow(self._timeout_s)) if limit.expired() else error)
            else:
                self._answer(index, score)

        async def settle_all() -> None:
            await asyncio.gather(*(settle(index, outcome) for index, outcome in waiting))

        if self._runner is None:  # one event loop for all chunks: functions keep connections bound to it
            self._runner = asyncio.Runner()
        self._runner.run(settle_all())

    def _answer(self, index: int, score: Score) -> None:
        message = {"i": index, "values": score.values, "prediction": score.prediction}
        if sum(map(len, score.values)) > MAX_LINE_BYTES // 32:  # a character may take 12 bytes
            error = RejectedResult(f"{len(score.values)} values are too many for one sample")
            return self._fail(index, error)
        self._send(message)

    def _fail(self, index: int, error: BaseException) -> None:
        # Leaked or fragmented memory would fail the next samples too, so a new process continues with them.
        last = isinstance(error, MemoryError)
        self._send({"i": index, "error": explain(error), "last": last})
        if last:
            os._exit(0)

    def _send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # the function forked and its child returned; only the parent answers
        self._work.sendall(json.dumps(message).encode() + b"\n")

    def _restore_state(self) -> None:
        """Reset the alarm and the working directory, which would affect the next sample."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            moved = os.getcwd() != self._cwd
        except FileNotFoundError:  # it was removed
            moved = True
        if moved:
            os.chdir(self._cwd)


def explain(error: BaseException) -> str:
    """Format a traceback; the middle of a very long one is left out."""
    traceback.clear_frames(error.__traceback__)  # they may hold the objects that filled the memory
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
    except MemoryError:
        text = "MemoryError"
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[: MAX_ERROR_CHARS // 4]}\n[...]\n{text[-MAX_ERROR_CHARS * 3 // 4 :]}"
    return encodable(text)


def too_slow(timeout_s: float) -> str:
    return f"the call took longer than the limit of {timeout_s:g} s"


def signal_name(number: int) -> str:
    names = {s.value: s.name for s in signal.Signals}
    return names.get(number, f"signal {number}")  # real-time signals have no name


# ---- processes ----


class Process(NamedTuple):
    """Parent and process group of a process."""

    parent: int
    group: int


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def all_processes() -> dict[int, Process]:
    """Return all processes by pid, from /proc/*/stat (not every kernel has /proc/<pid>/task/*/children)."""
    processes = {}
    for pid in _pids():
        with contextlib.suppress(OSError):  # it may have ended
            # pid (name) state parent group ...; the name may hold spaces and parentheses
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            processes[pid] = Process(int(fields[1]), int(fields[2]))
    return processes


def descendants(root: int, processes: Mapping[int, Process]) -> list[int]:
    """Return all descendants of `root`, parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:  # grows during the iteration
        found += children.get(pid, ())
    return found


def kill_marked(mark: str) -> None:
    """Kill the processes of this user whose environment has MARK=mark, for at most KILLING_S."""
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


if __name__ == "__main__":
    main()
