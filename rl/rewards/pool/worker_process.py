"""The pool's side of a worker process (worker.py): its start, its messages and its end."""

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
"""Seconds after its own time-out at which an async call counts as blocking the event loop."""
ENDED_WITHIN_S = 2.0
"""Seconds after the scorer's socket was closed within which the supervisor reports the reason."""


class WorkerProcess:
    """The pool's connection to a worker process."""

    def __init__(self, initialization: bytes, options: Mapping[str, Any], cwd: str, startup_s: float):
        """Start the process. Raises OSError if that fails."""
        self._work, work_end = socket.socketpair()
        self._control, control_end = socket.socketpair()
        self._mark = uuid.uuid4().hex
        ends = {"work": work_end.fileno(), "control": control_end.fileno()}
        options = {**options, **ends, "parent": os.getpid()}
        try:
            self._process = subprocess.Popen(
                # -P: the run directory may hold a random.py. The worker sets sys.path after its own imports.
                [sys.executable, "-P", "-m", "rl.rewards.pool.worker", json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=tuple(ends.values()),
                start_new_session=True,  # no signals from the terminal or to the launcher's process group
                cwd=cwd,
                env=_environment(self._mark),
            )
        except OSError:
            self._work.close()
            self._control.close()
            raise
        finally:
            work_end.close()
            control_end.close()
        for connection in (self._work, self._control):
            connection.setblocking(False)
        self.fds = (self._work.fileno(), self._control.fileno())
        self.outgoing = memoryview(initialization)
        self._polls_out = False
        self._work_buffer, self._control_buffer = bytearray(), bytearray()
        self.chunk: dict[int, None] = {}
        """Indices of the samples that are not answered, in order."""
        self.awaited: set[int] = set()
        """Indices in `chunk` that are called and awaited."""
        self.is_ready, self.is_async = False, False
        self.lost: str | None = None
        """Reason why the worker can no longer be used."""
        self.was_killed = False
        """Whether the supervisor ended without a message, which a call does not cause by accident."""
        self.is_disconnected = False
        """Whether the scorer's socket is closed; the supervisor will report the reason."""
        self._sweeping = False
        self.swept_at = self._shut_down_at = time.monotonic()
        self.deadline = time.monotonic() + startup_s
        self._startup_s = startup_s
        self.flush()

    @property
    def is_free(self) -> bool:
        return self.is_ready and not self.chunk and not self._sweeping and not self.is_disconnected

    def assign(self, indices: list[int], samples: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
        self.chunk, self.awaited = dict.fromkeys(indices), set()
        self.outgoing = memoryview(pickle.dumps([(i, dict(samples[i])) for i in indices]))
        self.set_deadline(timeout_s)
        self.flush()

    def set_deadline(self, timeout_s: float) -> None:
        """Set the deadline of the next answer."""
        if not self.chunk:
            self.deadline = math.inf
        elif len(self.awaited) < len(self.chunk):
            self.deadline = time.monotonic() + timeout_s
        else:
            self.deadline = time.monotonic() + timeout_s + ASYNC_GRACE_S

    def describe_timeout(self, timeout_s: float) -> str:
        """Return why the deadline has passed, for the log."""
        if self.is_disconnected:
            return "the call closed the connection of its process"
        if not self.is_ready:
            return f"a scoring worker was not ready after {self._startup_s:g} s; its imports may be too slow"
        return too_slow(timeout_s) + ", and its process was killed"

    def request_sweep(self) -> None:
        """Ask the supervisor to kill the orphans of finished calls; until then the worker is not free."""
        if self.is_ready and not self._sweeping:
            self._sweeping, self.deadline = True, time.monotonic() + KILLING_S
            with contextlib.suppress(OSError):  # `receive` notices the worker's end
                self._control.send(SWEEP)

    def flush(self) -> None:
        """Send as many bytes as the socket accepts."""
        try:
            with contextlib.suppress(BlockingIOError):
                while self.outgoing:
                    self.outgoing = self.outgoing[self._work.send(self.outgoing) :]
        except OSError:
            self.outgoing = memoryview(b"")  # `receive` notices the worker's end

    def needs_poll_update(self) -> bool:
        """Return whether polling for POLLOUT must be turned on or off."""
        changed = self._polls_out != bool(self.outgoing)
        self._polls_out = bool(self.outgoing)
        return changed

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the scorer's messages up to the first invalid one, then set `lost` if the worker is unusable.

        Each message must be recorded before the next is taken, because it changes which messages are valid.
        """
        # The supervisor's messages first: after its last one, all answers of the scorer can be read.
        self.was_killed = _read(self._control, self._control_buffer)
        ended = "the scoring worker was killed" if self.was_killed else None
        for line in _lines(self._control_buffer):
            message = json.loads(line)
            if "swept" in message:
                self._sweeping, self.swept_at, self.deadline = False, time.monotonic(), math.inf
            else:
                ended, self.was_killed = f"the call ended its process: {message['ended']}", False
        closed = _read(self._work, self._work_buffer, to_the_end=ended is not None)
        for line in _lines(self._work_buffer):
            message = self._validated(line)
            if message is None:
                self.lost = f"the scoring process sent an invalid message: {line[:80]!r}"
                return
            yield message
        if len(self._work_buffer) > MAX_LINE_BYTES:
            self.lost = "the scoring process sent an invalid message without an end"
        elif ended is not None:
            self.lost = ended
        elif closed and not self.is_disconnected:
            self.is_disconnected = True
            self.deadline = min(self.deadline, time.monotonic() + ENDED_WITHIN_S)

    def _validated(self, line: bytes) -> dict[str, Any] | None:
        """Parse a message of the scorer; return None if it is invalid: user code may have written it."""
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
            texts = message.get("unloadable"), message.get("traceback")
            return message if all(isinstance(text, str) for text in texts) else None
        index = message.get("i")
        if type(index) is not int or index not in self.chunk:
            return None
        if isinstance(message.get("error"), str):
            return message
        if message.get("waiting") is True:
            return message if index not in self.awaited else None
        values, prediction = message.get("values"), message.get("prediction")
        if not isinstance(values, dict) or "score" not in values:
            return None
        if not (prediction is None or isinstance(prediction, str)):
            return None
        finite = all(type(value) is float and math.isfinite(value) for value in values.values())
        return message if finite and all(map(str.isprintable, values)) else None

    def shut_down(self) -> None:
        """Make the supervisor kill its descendants and exit, and close the sockets."""
        self._shut_down_at = time.monotonic()
        self._process.send_signal(signal.SIGCONT)  # a descendant may have stopped it
        for connection in (self._control, self._work):
            # Not `close` alone: a fork of this process may hold a copy of the socket.
            with contextlib.suppress(OSError):  # the other end is closed
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def has_ended(self, *, wait: bool) -> bool:
        """Return whether the process has ended (with `wait`, wait for it); kill descendants that it left."""
        left_s = self._shut_down_at + KILLING_S + 5.0 - time.monotonic()
        if wait and left_s > 0:
            try:
                self._process.wait(left_s)
            except subprocess.TimeoutExpired:
                left_s = 0.0
        if self._process.poll() is None:
            if left_s > 0:
                return False
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:
            kill_marked(self._mark)
        return True


def _environment(mark: str) -> dict[str, str]:
    """Return a worker's environment: the path to this package, its mark, and one thread per library.

    OpenBLAS reserves address space for each of its threads and would exceed the limit on a large host.
    """
    root = str(Path(__file__).resolve().parents[3])
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
    )
    return {**os.environ, **threads, "PYTHONPATH": python_path, MARK: mark}


def _read(source: socket.socket, into: bytearray, *, to_the_end: bool = False) -> bool:
    """Append available bytes, at most 256 KiB unless `to_the_end`; return whether the other end is closed."""
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
    """Remove and return the complete lines in the buffer."""
    end = buffer.rfind(b"\n") + 1
    lines = bytes(buffer[:end]).split(b"\n")[:-1]
    del buffer[:end]
    return lines
