"""The training process's side of a worker process: its start, its messages and its end."""

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.workers.supervisor import KILLING_S, MARK, SWEEP, kill_marked

VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|TE?MP|LANG|LANGUAGE|LC_.*|XDG_.*|PYTHON.*"
    r"|LD_(LIBRARY_PATH|PRELOAD)|VIRTUAL_ENV|CONDA_PREFIX|JAVA_HOME|CUDA_.*"
    r"|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|(?i:https?_proxy|all_proxy|no_proxy)"
    r"|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_.*|ENDPOINT)|HUGGINGFACE_HUB_CACHE"
    r"|TRANSFORMERS_(OFFLINE|CACHE)|TORCH_HOME|NLTK_DATA"
    r"|(TRITON|TORCHINDUCTOR|NUMBA|QUACK|CUTE_DSL|FLASH_ATTENTION_CUTE_DSL|TVM_FFI|TILELANG|HUMMING)_CACHE_DIR|VLLM_CACHE_ROOT"
    r"|FLASHINFER_WORKSPACE_BASE|TORCH_EXTENSIONS_DIR"
    r"|SLURM_(?!JWT).*|MODULE(PATH|SHOME)|LOADEDMODULES|LMOD_.*"  # SLURM_JWT is a key
)
"""Names of the environment variables that every worker inherits: paths, locale, proxies, devices and the job,
no keys. Workers run users' code, and some of it runs what a model wrote, so they get no keys that they do not
need. Configs name further variables."""
ENDED_WITHIN_S = 2.0
"""Seconds after the host's socket was closed within which the supervisor reports the reason."""


class WorkerProcess(ABC):
    """The connection to a worker process. The class of a pool decides which messages are valid."""

    noun = ""
    """Kind of the worker, for messages."""
    ready_type: type
    """Type of what the host sends when it is ready."""
    max_line_bytes = 1 << 20
    """Maximum length of a message of the host."""

    def __init__(
        self,
        command: list[str],
        initialization: bytes,
        options: Mapping[str, Any],
        *,
        cwd: str,
        startup_s: float,
        variables: Collection[str] = (),
    ):
        """Start the process. Raises OSError if that fails.

        Args:
            command: starts a Python program that calls `run_worker`; its options are appended.
            initialization: the first pickle for the host.
            options: `memory_mib`, `cpus`, and what the host reads.
            startup_s: limit of the start, until `is_ready`, in seconds.
            variables: names of environment variables that it inherits besides VARIABLES.
        """
        self._work, work_end = socket.socketpair()
        self._control, control_end = socket.socketpair()
        self._mark = uuid.uuid4().hex
        ends = {"work": work_end.fileno(), "control": control_end.fileno()}
        options = {**options, **ends, "parent": os.getpid()}
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=tuple(ends.values()),
                start_new_session=True,  # no signals from the terminal or to the launcher's process group
                cwd=cwd,
                env=_environment(self._mark, variables),
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
        self.outgoing: deque[memoryview] = deque()
        self._polls_out = False
        self._work_buffer, self._control_buffer = bytearray(), bytearray()
        self.ready: Any = None
        """Value that the host sent when it was ready."""
        self.lost: str | None = None
        """Reason why the worker can no longer be used."""
        self.was_killed = False
        """Whether the supervisor ended without a message, which a call does not cause by accident."""
        self.is_disconnected = False
        """Whether the host's socket is closed; the supervisor will report the reason."""
        self.sweeping = False
        self.swept_at = self._shut_down_at = time.monotonic()
        self.deadline = time.monotonic() + startup_s
        self._startup_s = startup_s
        self.send(initialization)

    @property
    def is_ready(self) -> bool:
        return self.ready is not None

    def send(self, message: bytes) -> None:
        """Send a pickle to the host, now or when its socket accepts it."""
        self.outgoing.append(memoryview(message))
        self.flush()

    def describe_timeout(self) -> str:
        """Return why the deadline of a start or of a closed connection has passed."""
        if self.is_disconnected:
            return "the call closed the connection of its process"
        return (
            f"a worker ({self.noun}) was not ready after {self._startup_s:g} s; its imports may be too slow"
        )

    def request_sweep(self) -> None:
        """Ask the supervisor to kill the orphans of finished calls; until then the worker is not free."""
        if self.is_ready and not self.sweeping:
            self.sweeping, self.deadline = True, time.monotonic() + KILLING_S
            with contextlib.suppress(OSError):  # `receive` notices the worker's end
                self._control.send(SWEEP)

    def flush(self) -> None:
        """Send as many bytes as the socket accepts."""
        try:
            with contextlib.suppress(BlockingIOError):
                while self.outgoing:
                    self.outgoing[0] = self.outgoing[0][self._work.send(self.outgoing[0]) :]
                    if not self.outgoing[0]:
                        self.outgoing.popleft()
        except OSError:
            self.outgoing.clear()  # `receive` notices the worker's end

    def needs_poll_update(self) -> bool:
        """Return whether polling for POLLOUT must be turned on or off."""
        changed = self._polls_out != bool(self.outgoing)
        self._polls_out = bool(self.outgoing)
        return changed

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the host's messages up to the first invalid one, then set `lost` if the worker is unusable.

        Each message must be recorded before the next is taken, because it changes which messages are valid.
        """
        # The supervisor's messages first: after its last one, all answers of the host can be read.
        self.was_killed = _read(self._control, self._control_buffer, limit=self.max_line_bytes)
        ended = f"the worker ({self.noun}) was killed" if self.was_killed else None
        for line in _lines(self._control_buffer):
            message = json.loads(line)
            if "swept" in message:
                self.sweeping, self.swept_at, self.deadline = False, time.monotonic(), math.inf
            else:
                ended, self.was_killed = f"the call ended its process: {message['ended']}", False
        closed = _read(self._work, self._work_buffer, to_the_end=ended is not None, limit=self.max_line_bytes)
        for line in _lines(self._work_buffer):
            message = self.validated(line)
            if message is None:
                self.lost = f"the process ({self.noun}) sent an invalid message: {line[:80]!r}"
                return
            yield message
        if len(self._work_buffer) > self.max_line_bytes:
            self.lost = f"the process ({self.noun}) sent an invalid message without an end"
        elif ended is not None:
            self.lost = ended
        elif closed and not self.is_disconnected:
            self.is_disconnected = True
            self.deadline = min(self.deadline, time.monotonic() + ENDED_WITHIN_S)

    def validated(self, line: bytes) -> dict[str, Any] | None:
        """Parse a message of the host; return None if it is invalid: users' code may have written it."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(message, dict):
            return None
        if self.is_ready:
            return message if self.is_valid(message) else None
        if isinstance(message.get("ready"), self.ready_type):
            self.ready, self.deadline = message["ready"], math.inf
            return message
        texts = message.get("unloadable"), message.get("traceback")
        return message if all(isinstance(text, str) for text in texts) else None

    @abstractmethod
    def is_valid(self, message: dict[str, Any]) -> bool:
        """Return whether a message of a host that is ready is valid."""

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


def _environment(mark: str, variables: Collection[str]) -> dict[str, str]:
    """Return a worker's environment: VARIABLES and `variables`, the path to this package, its mark, and one
    thread per library.

    OpenBLAS reserves address space for each of its threads and would exceed the limit on a large host.
    """
    root = str(Path(__file__).resolve().parents[2])
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
    )
    inherited = {k: v for k, v in os.environ.items() if k in variables or VARIABLES.fullmatch(k)}
    return {**inherited, **threads, "PYTHONPATH": python_path, MARK: mark}


def _read(source: socket.socket, into: bytearray, *, limit: int, to_the_end: bool = False) -> bool:
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
        if not to_the_end or len(into) > 2 * limit:
            return False


def _lines(buffer: bytearray) -> list[bytes]:
    """Remove and return the complete lines in the buffer."""
    end = buffer.rfind(b"\n") + 1
    lines = bytes(buffer[:end]).split(b"\n")[:-1]
    del buffer[:end]
    return lines
