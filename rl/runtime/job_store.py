"""The job's store: keys with values that all ranks share, readable and writable only with the job's key.

torch's TCPStore serves every client that reaches its port. Therefore only torch uses it, for the addresses of
its groups, and this project's own messages are in this store: the first fault, stop requests, work queues,
and what trainers and generators announce to each other.
"""

import contextlib
import hmac
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rl.runtime.job_key import NUM_BYTES, Seal, is_proof, nonce, proof
from rl.runtime.store_server import MAX_BYTES, TO_CLIENT, TO_SERVER, StoreTable

CONNECT_S = 20.0
"""Maximum time for trying a connection again, in seconds."""
GREET_S = 5.0
"""Maximum wait for the server's part of the proofs, in seconds."""
PAUSE_S = 0.05
"""Pause between two attempts to connect, in seconds."""
ANSWER_S = 300.0
"""Maximum wait for an answer, in seconds, in addition to the request's own wait."""
LOOKS_PER_S = 4096
"""Maximum number of looks into the store that the ranks together take per second for each purpose. The store
answers about 30,000 requests per second (tools/dev/many_ranks.py)."""
_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000))
"""Socket options that let a client notice within half a minute that the server's host is gone."""
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from rl.runtime.store_server import main; main()"

Ask = Callable[[str, list[str], object, bytes], bytes]
"""Sends a request (operation, keys, argument, value) and returns the answer."""


class StoreError(RuntimeError):
    """Raised if the process that holds the store has ended or cannot be reached."""


class JobStore:
    """A connection to the store. Not collective. Each method raises StoreError if the store is gone.

    Threads may share it, but while one thread waits, the other threads block. `clone` returns a separate
    connection.
    """

    def __init__(self, connect: Callable[[], Ask], prefix: str = ""):
        self._connect, self._prefix, self._ask, self._lock = connect, prefix, connect(), threading.Lock()

    def clone(self, prefix: str = "") -> "JobStore":
        """Return another connection to the store, which puts `prefix` before its keys."""
        return JobStore(self._connect, f"{self._prefix}{prefix}/" if prefix else self._prefix)

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", [key], value=value)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, None if it has none."""
        return _unpack(self._request("get", [key]))

    def add(self, key: str, amount: int) -> int:
        """Add to the counter of this key, which begins at 0, and return the sum.

        For example, the third add of 1 returns 3.
        """
        return int(self._request("add", [key], amount))

    def compare_set(self, key: str, expected: str, value: str | bytes) -> bytes:
        """Set the value if the present value is `expected` ('' if there is none).

        Return the value that the key has then.
        """
        return self._request("compare_set", [key], expected, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether each key has a value or an item in its queue."""
        return not keys or bool(self._request("check", keys))

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until `check` is true; return False if it is not after this time."""
        return not keys or bool(self._request("wait", keys, seconds))

    def delete(self, key: str) -> None:
        self._request("delete", [key])

    def push(self, key: str, value: str | bytes) -> None:
        """Append to the queue of this key."""
        self._request("push", [key], value=value)

    def pop(self, key: str) -> bytes | None:
        """Remove the first item of the queue and return it, None if there is none."""
        return _unpack(self._request("pop", [key]))

    def _request(
        self, operation: str, keys: Sequence[str], argument: object = None, value: str | bytes = b""
    ) -> bytes:
        content = value.encode() if isinstance(value, str) else value
        with self._lock:
            return self._ask(operation, [self._prefix + key for key in keys], argument, content)


def look_s(world_size: int) -> float:
    """Return the seconds between two looks of a rank into the store, so that thousands do not overload it."""
    return world_size / LOOKS_PER_S


def _unpack(answer: bytes) -> bytes | None:
    return answer[1:] if answer else None


# Within one process -------------------------------------------------------------------------------------


def own_store() -> JobStore:
    """Return a store of this process, for a job of one rank."""
    table, lock = StoreTable(), threading.Lock()

    def ask(operation: str, keys: list[str], argument: object, value: bytes) -> bytes:
        if operation != "wait":
            with lock:
                return table.answer(operation, keys, argument, value)
        assert isinstance(argument, (int, float))
        deadline = time.monotonic() + argument
        while table.missing(keys) and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        return table.answer("check", keys, None, b"")

    return JobStore(lambda: ask)


# Across processes ---------------------------------------------------------------------------------------


class StoreProcess:
    """The process that holds the store, started by rank 0; see `rl.runtime.store_server`."""

    def __init__(self, listener: socket.socket, secret: bytes):
        """Start it. listener: where clients connect; they may do so at once."""
        root = str(Path(__file__).resolve().parents[2])
        with listener:
            # -I and -S keep out the user's modules and start-up files. A session of its own keeps out the
            # signals of a terminal.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, root, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
                bufsize=0,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(secret)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()  # a process that a user's code has forked may hold the pipe open
        self._process.wait()


def connect_to(host: str, port: int, secret: bytes) -> JobStore:
    """Return a connection to the store of this job at the address. Raises StoreError."""
    return JobStore(lambda: _Connection(host, port, secret).ask)


class _Connection:
    def __init__(self, host: str, port: int, secret: bytes):
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                self._open(host, port, secret)
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"the job's store at {host}:{port} cannot be reached: {error}; the other nodes must "
                        "reach this address of rank 0's node, and all ranks need the same key "
                        "(a shared run.dir, or LOCKSTEP_JOB_KEY)."
                    ) from error
                time.sleep(PAUSE_S)

    def _open(self, host: str, port: int, secret: bytes) -> None:
        self._socket = socket.create_connection((host, port), timeout=GREET_S)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _ALIVE:
                with contextlib.suppress(AttributeError):  # not on Linux
                    self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            nonces = self._receive(NUM_BYTES), nonce()
            self._socket.sendall(nonces[1] + proof(secret, TO_SERVER, *nonces))
            if not is_proof(self._receive(NUM_BYTES), secret, TO_CLIENT, *nonces):
                raise ConnectionError("another program listens there")
        except OSError:
            self._socket.close()
            raise
        self._sent, self._received = (
            Seal(secret, f"{label} message", *nonces) for label in (TO_SERVER, TO_CLIENT)
        )

    def ask(self, operation: str, keys: list[str], argument: object, value: bytes) -> bytes:
        """Send a request and return its answer. Raises StoreError; then the connection is closed."""
        message = json.dumps([operation, keys, argument]).encode() + b"\n" + value
        if len(message) > MAX_BYTES - 4:
            raise ValueError(f"a value has {len(value)} bytes; the job's store holds at most {MAX_BYTES}")
        limit = ANSWER_S
        if operation == "wait":
            assert isinstance(argument, (int, float))
            limit += min(argument, 1e6)  # a socket's limit must be below 25 days
        try:
            self._socket.settimeout(limit)
            self._socket.sendall(
                b"".join((len(message).to_bytes(4, "big"), message, self._sent.next(message)))
            )
            answer = self._receive(int.from_bytes(self._receive(4), "big"))
            if not hmac.compare_digest(self._receive(NUM_BYTES), self._received.next(answer)):
                raise ConnectionError("an answer has no proof of the server")
            return answer
        except OSError as error:
            self._socket.close()
            raise StoreError(f"lost the connection to the job's store: {error}") from error

    def _receive(self, size: int) -> bytes:
        """Return exactly this number of bytes."""
        if size > MAX_BYTES:
            raise ConnectionError("an answer is too long")
        received = bytearray()
        while len(received) < size:
            piece = self._socket.recv(min(size - len(received), 1 << 20))
            if not piece:
                raise ConnectionError("connection closed")
            received += piece
        return bytes(received)
