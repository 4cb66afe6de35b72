"""A worker process of the scoring pool, from the pool's end: what is sent to it, what it says, how it ends (worker.py)."""

import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.rewards.pool.worker import KILLING_S, MARK, MAX_LINE_BYTES, SWEEP, kill_marked, too_slow

ASYNC_GRACE_S = 2.0
"""How much later than its own time-out an async call is taken to have blocked the event loop."""
ENDED_WITHIN_S = 2.0
"""How long after the scorer's end of the socket was closed its supervisor is given to say why."""


class WorkerProcess:
    """The pool's end of a worker process."""

    def __init__(self, greeting: bytes, options: Mapping[str, Any], cwd: str, startup_s: float):
        """Raises OSError if the process cannot be started."""
        self._work, work_end = socket.socketpair()
        self._life, life_end = socket.socketpair()
        self._mark = uuid.uuid4().hex
        options = {**options, "work": work_end.fileno(), "life": life_end.fileno(), "parent": os.getpid()}
        try:
            self._process = subprocess.Popen(
                # -P: the directory of the run may hold a random.py. The path of this process is set once ours are imported.
                [sys.executable, "-P", "-m", "rl.rewards.pool.worker", json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(work_end.fileno(), life_end.fileno()),
                start_new_session=True,  # no signals of the terminal, none that the launcher sends to our group
                cwd=cwd,
                env=_environment(self._mark),
            )
        except OSError:
            self._work.close()
            self._life.close()
            raise
        finally:
            work_end.close()
            life_end.close()
        for ours in (self._work, self._life):
            ours.setblocking(False)
        self.fds = (self._work.fileno(), self._life.fileno())
        self.outgoing = memoryview(greeting)
        self._polls_out = False
        self._incoming, self._news = bytearray(), bytearray()
        self.chunk: dict[int, None] = {}
        """Indices of the samples it has not answered, in order."""
        self.awaited: set[int] = set()
        """Those of them that are called and awaited."""
        self.is_ready, self.is_async = False, False
        self.lost: str | None = None
        """Why it is of no use any more."""
        self.was_killed = False
        """Its supervisor is gone without a word: killed, which a call does not do by accident."""
        self.hung_up = False
        """The scorer's end is closed; why, its supervisor will say."""
        self._sweeping = False
        self.swept_at = self._left_at = time.monotonic()
        self.deadline = time.monotonic() + startup_s
        self._startup_s = startup_s
        self.flush()

    @property
    def is_free(self) -> bool:
        return self.is_ready and not self.chunk and not self._sweeping and not self.hung_up

    def assign(self, indices: list[int], samples: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
        self.chunk, self.awaited = dict.fromkeys(indices), set()
        self.outgoing = memoryview(pickle.dumps([(i, dict(samples[i])) for i in indices]))
        self.set_deadline(timeout_s)
        self.flush()

    def set_deadline(self, timeout_s: float) -> None:
        """Of the next answer."""
        if not self.chunk:
            self.deadline = math.inf
        elif len(self.awaited) < len(self.chunk):
            self.deadline = time.monotonic() + timeout_s
        else:
            self.deadline = time.monotonic() + timeout_s + ASYNC_GRACE_S

    def lateness(self, timeout_s: float) -> str:
        """What it means that the deadline is over."""
        if self.hung_up:
            return "the call closed the connection of its process"
        if not self.is_ready:
            return f"a scoring worker was not ready within {self._startup_s:g} s: the import of the reward function takes longer"
        return too_slow(timeout_s) + ", and its process was killed"

    def ask_to_sweep(self) -> None:
        """Have the strays killed that finished calls have left; it is not free until that is done."""
        if self.is_ready and not self._sweeping:
            self._sweeping, self.deadline = True, time.monotonic() + KILLING_S
            with contextlib.suppress(OSError):  # its end is in the news
                self._life.send(SWEEP)

    def flush(self) -> None:
        """Send as much as there is room for."""
        try:
            with contextlib.suppress(BlockingIOError):
                while self.outgoing:
                    self.outgoing = self.outgoing[self._work.send(self.outgoing) :]
        except OSError:
            self.outgoing = memoryview(b"")  # its end is in the news

    def wants_pollout(self) -> bool:
        """Whether waiting for room to send must be turned on or off."""
        changed = self._polls_out != bool(self.outgoing)
        self._polls_out = bool(self.outgoing)
        return changed

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages from the scorer up to the first that is not valid. Sets `lost` after them at that or at the worker's end.

        What a message says must be noted before the next is taken: it decides what is valid then.
        """
        # The supervisor's news first: what the scorer has answered before its end is then there to be read.
        self.was_killed = _read(self._life, self._news)
        ended = "the scoring worker was killed" if self.was_killed else None
        for line in _lines(self._news):
            message = json.loads(line)
            if "swept" in message:
                self._sweeping, self.swept_at, self.deadline = False, time.monotonic(), math.inf
            else:
                ended, self.was_killed = f"the call ended its process: {message['ended']}", False
        closed = _read(self._work, self._incoming, to_the_end=ended is not None)
        for line in _lines(self._incoming):
            message = self._validated(line)
            if message is None:
                self.lost = f"the scoring process wrote something that is no answer: {line[:80]!r}"
                return
            yield message
        if len(self._incoming) > MAX_LINE_BYTES:
            self.lost = "the scoring process wrote something that is no answer, and does not end"
        elif ended is not None:
            self.lost = ended
        elif closed and not self.hung_up:
            self.hung_up, self.deadline = True, min(self.deadline, time.monotonic() + ENDED_WITHIN_S)

    def _validated(self, line: bytes) -> dict[str, Any] | None:
        """A message of the scorer; None if it is none, for what runs there can write anything."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(message, dict):
            return None
        if not self.is_ready:
            if isinstance(message.get("ready"), bool):
                self.is_ready, self.is_async, self.deadline = True, message["ready"], math.inf
                return message
            return (
                message
                if all(isinstance(message.get(key), str) for key in ("unloadable", "traceback"))
                else None
            )
        index = message.get("i")
        if type(index) is not int or index not in self.chunk:
            return None
        if isinstance(message.get("error"), str):
            return message
        if message.get("waiting") is True:
            return message if index not in self.awaited else None
        values, prediction = message.get("values"), message.get("prediction")
        if (
            not isinstance(values, dict)
            or "score" not in values
            or not (prediction is None or isinstance(prediction, str))
        ):
            return None
        finite = all(type(value) is float and math.isfinite(value) for value in values.values())
        return message if finite and all(map(str.isprintable, values)) else None

    def leave(self) -> None:
        """Have it kill all it started and end. Not `close` alone: a fork of this process may hold a copy of the socket."""
        self._left_at = time.monotonic()
        self._process.send_signal(signal.SIGCONT)  # it may have been stopped from below
        for ours in (self._life, self._work):
            with contextlib.suppress(OSError):  # the other end is gone
                ours.shutdown(socket.SHUT_RDWR)
            ours.close()

    def is_gone(self, *, wait: bool) -> bool:
        """Whether it has ended; waits for it if asked to. Kills what is left when it did not clear up after itself."""
        patience = self._left_at + KILLING_S + 5.0 - time.monotonic()
        if wait and patience > 0:
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                patience = 0.0
        if self._process.poll() is None:
            if patience > 0:
                return False
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:
            kill_marked(self._mark)
        return True


def _environment(mark: str) -> dict[str, str]:
    """Of a worker: it finds this package, is known by its mark, and is one core's worth of a process. OpenBLAS reserves
    address space for each of its threads, and would hit the limit on a host with many cores."""
    root = str(Path(__file__).resolve().parents[3])
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
    )
    return {**os.environ, **threads, "PYTHONPATH": python_path, MARK: mark}


def _read(source: socket.socket, into: bytearray, *, to_the_end: bool = False) -> bool:
    """Append what is there, 256 KiB of it unless all is wanted; whether the other end is closed."""
    while True:
        try:
            data = source.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if not data:
            return True
        into += data
        if not to_the_end or len(into) > 2 * MAX_LINE_BYTES:
            return False


def _lines(buffer: bytearray) -> list[bytes]:
    """Take the complete lines out of the buffer."""
    end = buffer.rfind(b"\n") + 1
    lines = bytes(buffer[:end]).split(b"\n")[:-1]
    del buffer[:end]
    return lines
