"""One worker of the scoring pool: a supervisor, and under it the process that calls the reward functions.

    training process --life socket--> supervisor          python -m rl.rewards.pool.worker, runs no foreign code
                    \\--work socket--> `- scorer           its fork: imports and calls the reward functions
                                         `- ...           whatever they start

Two processes, because the one that runs foreign code can be stuck, stopped or dead when it has to be killed with all that it
started. The supervisor is a child subreaper (prctl(2)): a process below it that loses its parent, by a double fork or a dead
session leader, becomes the supervisor's child and is found there. It ends the whole tree when the training process says so or is
gone, and itself when the scorer has ended. Its only child is the scorer; any other is a stray (see `Supervisor.sweep`).

On the life socket: SWEEP from the pool, JSON lines {"swept": true} and {"ended": why} to it. On the work socket the pool
sends pickles, first (plan, sys.path), then chunks [(index, sample), ...]; back come JSON lines, for the pool must not unpickle
what foreign code could have written:

    {"ready": is_async} or {"unloadable": sentence, "traceback": text}       once, after the functions were imported
    {"i": index, "values": {name: number}, "prediction": text or null}       a score
    {"i": index, "error": text, "last": bool}                                a failure; last: this process leaves
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
"""Environment variable of a worker's processes, by which they are found if the supervisor was killed."""
MAX_LINE_BYTES = 1 << 20
MAX_ERROR_CHARS = 4000
KILLING_S = 10.0
"""How long the supervisor tries to get rid of what is below it; a process in an uninterruptible wait (NFS) may outlast it."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main() -> None:
    options = json.loads(sys.argv[1])
    work, life = (socket.socket(fileno=options[name]) for name in ("work", "life"))
    for ours in (work, life):
        ours.set_inheritable(
            False
        )  # inheritable to get here, but no program of a reward function should have them
    with contextlib.suppress(OSError):  # the job's CPUs have changed since; then those of the parent will do
        os.sched_setaffinity(0, options["cpus"])
    supervisor = Supervisor(life, parent=options["parent"])
    pid = os.getpid()
    scorer = os.fork()
    if scorer == 0:
        try:
            supervisor.leave_to_scorer()
            confine(memory_mib=options["memory_mib"], supervisor=pid)
            Scorer(work, timeout_s=options["timeout_s"]).serve()
        finally:
            os._exit(1)  # nothing of the supervisor's may run here
    work.close()
    sys.exit(supervisor.watch(scorer))


class Supervisor:
    """Keeps no process below it alive for longer than the training process wants it."""

    def __init__(self, life: socket.socket, *, parent: int):
        """Takes over this process's signals. `parent` is the pid of the training process."""
        self._life, self._parent = life, parent
        self._scorer = 0
        self._ended: str | None = None
        self._wakeups, self._wakeup_end = socket.socketpair()
        self._wakeup_end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        # Slurm may send any of these to every process of a step. They are for the training process to act on, which may go on
        # to score the step's samples: pre-emption begins with a SIGTERM and a time of grace.
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(ignored, signal.SIG_IGN)
        for noted in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(noted, lambda number, frame: None)  # its number arrives through the wake-up socket
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        # SIGHUP when the parent dies, and also when only the thread that started us does, hence not SIGKILL. The socket says
        # it too, but not while a fork of the training process holds a copy of its end.
        _prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def leave_to_scorer(self) -> None:
        """Undo in the forked scorer what was set up for the supervisor."""
        signal.set_wakeup_fd(-1)
        for noted in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(noted, signal.SIG_DFL)
        # Ignored by the scorer, too, but not by what it starts, which a reward function may want to end by SIGTERM.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        for ours in (self._life, self._wakeups, self._wakeup_end):
            ours.close()

    def watch(self, scorer: int) -> int:
        """Until the scorer or the training process has ended. Returns the exit status: 0 if nothing is left below."""
        self._scorer = scorer
        poller = select.poll()
        poller.register(self._life, select.POLLIN)
        poller.register(self._wakeups, select.POLLIN)
        wanted = True
        while wanted and self._ended is None and os.getppid() == self._parent:
            for fd, _ in poller.poll():
                if fd == self._life.fileno():
                    wanted = self._obey() and wanted
                else:
                    self._wakeups.recv(4096)
            self._reap()
        cleared = self._kill_all()
        if self._ended is not None:
            self._say({"ended": self._ended})
        return 0 if cleared else 1

    def sweep(self) -> None:
        """Kill the strays: what has lost its parent, and what is below it.

        What the scorer's own process started and is still above, such as a pool of processes, stays for the next call.
        """
        processes = all_processes()
        own = {self._scorer, *below(self._scorer, processes)}
        for pid in below(os.getpid(), processes):
            if pid not in own:
                _kill(pid)

    def _obey(self) -> bool:
        """Do what the pool asks; False if it is gone or wants us gone."""
        try:
            asked = self._life.recv(4096)
        except ConnectionResetError:
            asked = b""
        if SWEEP in asked:
            self.sweep()
            self._say({"swept": True})
        return bool(asked)

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the pool may be gone; the life socket's end tells
            self._life.sendall(json.dumps(message).encode() + b"\n")

    def _reap(self) -> bool:
        """Collect what has died; False if there are no children left."""
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
        """Kill and reap everything below; False if it did not go in KILLING_S."""
        poller = select.poll()
        poller.register(self._wakeups, select.POLLIN)
        deadline = time.monotonic() + KILLING_S
        # Round after round: a process can fork between our look at /proc and its death, and its child comes to us.
        while self._reap() and time.monotonic() < deadline:
            processes = all_processes()
            found = below(os.getpid(), processes)
            # A group dies at one blow, so that one that forks on and on does not get away. No group has members elsewhere:
            # it belongs to one session, and all sessions but ours began below us.
            for group in {processes[pid].group for pid in found} - {
                os.getpgid(0),
                0,
                1,
            }:  # kill(-1) would mean everyone
                _kill(-group)
            for pid in found:
                _kill(pid)
            for _ in poller.poll(20):  # ms, or until a SIGCHLD
                self._wakeups.recv(4096)
        return not self._reap()


def confine(*, memory_mib: int, supervisor: int) -> None:
    """Limits of the process that will run foreign code; what it starts inherits all but the first."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    os.setsid()  # kill(0, ...) reaches no supervisor
    os.nice(5)
    with contextlib.suppress(
        OSError
    ):  # no writable /proc; then the kernel chooses whom to kill when memory is out
        Path("/proc/self/oom_score_adj").write_text("1000")
    lower_limit(resource.RLIMIT_CORE, 0)  # a core dump per crash would fill the disk
    if memory_mib:
        lower_limit(resource.RLIMIT_AS, memory_mib << 20)


def lower_limit(kind: int, limit: int) -> None:
    """Set soft and hard limit to `limit`, or to the present hard limit if that is lower."""
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


class Scorer:
    """Calls the reward functions on what comes over the work socket, and answers there."""

    def __init__(self, work: socket.socket, *, timeout_s: float):
        self._work, self._timeout_s = work, timeout_s
        self._pid = os.getpid()
        self._cwd = os.getcwd()
        self._runner = None

    def serve(self) -> None:
        """Until the socket's end."""
        stream = self._work.makefile("rb")
        plan, sys.path[:] = pickle.load(stream)
        try:
            mixture = Mixture(plan)
        except BaseException as error:  # an import runs foreign code, which may call exit()
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
                self._tidy()

    def _call(
        self, mixture: Mixture, chunk: Sequence[tuple[int, Mapping[str, Any]]]
    ) -> list[tuple[int, Awaitable[Score]]]:
        """Score one sample after the other; returns those that must be awaited."""
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
            self._tidy()
        return waiting

    def _await(self, waiting: Sequence[tuple[int, Awaitable[Score]]]) -> None:
        """Await all concurrently, each with a limit of its own, and answer each at its end."""
        import asyncio  # here: it would take half of the time that a worker needs to start, and few functions are async

        async def settle(index: int, outcome: Awaitable[Score]) -> None:
            # Not wait_for, which runs the call in a task of its own: calls that block would be answered after the last one.
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    score = await outcome
            except BaseException as error:
                self._fail(index, TimeoutError(too_slow(self._timeout_s)) if limit.expired() else error)
            else:
                self._answer(index, score)

        async def settle_all() -> None:
            await asyncio.gather(*(settle(index, outcome) for index, outcome in waiting))

        if self._runner is None:  # one event loop for good: functions keep connections that belong to it
            self._runner = asyncio.Runner()
        self._runner.run(settle_all())

    def _answer(self, index: int, score: Score) -> None:
        message = {"i": index, "values": score.values, "prediction": score.prediction}
        if sum(map(len, score.values)) > MAX_LINE_BYTES // 32:  # each name may take 12 bytes a character
            return self._fail(
                index, RejectedResult(f"{len(score.values)} values are too many for one sample")
            )
        self._send(message)

    def _fail(self, index: int, error: BaseException) -> None:
        # Memory that leaked, or lies about in fragments, would fail the next samples too: leave, a fresh process takes over.
        last = isinstance(error, MemoryError)
        self._send({"i": index, "error": explain(error), "last": last})
        if last:
            os._exit(0)

    def _send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # the function forked and let the child return; the sample is the parent's to answer
        self._work.sendall(json.dumps(message).encode() + b"\n")

    def _tidy(self) -> None:
        """Undo what would hit the next sample: another working directory, an alarm still set."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            moved = os.getcwd() != self._cwd
        except FileNotFoundError:  # it was removed
            moved = True
        if moved:
            os.chdir(self._cwd)


def explain(error: BaseException) -> str:
    """Its traceback, of which a very long one loses its middle."""
    traceback.clear_frames(
        error.__traceback__
    )  # what filled the memory hangs on them, and formatting needs some
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


# Processes ------------------------------------------------------------------------------------------------------------


class Process(NamedTuple):
    """Where a process belongs."""

    parent: int
    group: int


def all_processes() -> dict[int, Process]:
    """By pid, from /proc/*/stat; /proc/<pid>/task/*/children would be quicker, but not every kernel has it."""
    processes = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/stat", "rb") as file,
        ):  # it may be gone in the meantime
            # pid (name) state parent group ...; the name may hold spaces and parentheses
            fields = file.read().rpartition(b")")[2].split()
            processes[int(pid)] = Process(int(fields[1]), int(fields[2]))
    return processes


def below(root: int, processes: Mapping[int, Process]) -> list[int]:
    """All descendants of `root`, parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:  # grows as it goes
        found += children.get(pid, ())
    return found


def kill_marked(mark: str) -> None:
    """Kill the processes of this user whose environment has MARK=mark, until there are none or KILLING_S are over."""
    wanted = f"{MARK}={mark}".encode()
    deadline = time.monotonic() + KILLING_S
    while found := [
        pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if wanted in _environment(pid)
    ]:
        for pid in found:
            _kill(pid)
        if time.monotonic() > deadline:
            return


def _environment(pid: int) -> list[bytes]:
    """Of a process that is not a zombie and belongs to this user; else nothing."""
    try:
        return Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _kill(pid: int) -> None:
    """`pid`, or the process group -pid."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; or a set-uid program
        os.kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    main()
