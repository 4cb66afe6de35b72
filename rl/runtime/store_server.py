"""The process that holds the job's store: keys with values, and queues.

Rank 0 starts this process (`rl.runtime.job_store`). The store has its own process, because rank 0's
interpreter is busy for seconds at a time. The process ends with rank 0.

A connection begins with proofs of the job's key in both directions, before anything else is read:
server: nonce; client: nonce, proof; server: proof. Then the client sends requests and the server one answer
to each. A message is its length (4 bytes), its content and its proof (`Seal`). A request is one line of JSON,
[operation, keys, argument], and after it the bytes of a value.

Connections without a proof do not delay others (`rl.runtime.strangers`). This module imports only the
standard library, so that it starts in a fraction of a second.
"""

import asyncio
import ctypes
import hmac
import json
import os
import resource
import signal
import socket
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from rl.runtime.job_key import NUM_BYTES, Seal, is_proof, nonce, proof
from rl.runtime.strangers import Strangers

PROOF_S = 5.0
"""Maximum time until a connection has sent its proof, in seconds."""
MAX_BYTES = 1 << 30
"""Maximum length of a message, in bytes."""
TO_SERVER, TO_CLIENT = "store to server", "store to client"
"""Labels of the proofs of either side."""
_PR_SET_PDEATHSIG = 1


class StoreTable:
    """The content of a store."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: defaultdict[str, deque[bytes]] = defaultdict(deque)

    def missing(self, keys: Sequence[str]) -> str | None:
        """Return the first of the keys that has no value and no item in a queue; None if all have."""
        return next((key for key in keys if key not in self._values and not self._queues.get(key)), None)

    def answer(self, operation: str, keys: list[str], argument: Any, value: bytes) -> bytes:
        """Carry out a request that waits for nothing, and return its answer."""
        key = keys[0]
        if operation == "get":
            found = self._values.get(key)
            return b"" if found is None else b"=" + found
        if operation == "check":
            return b"" if self.missing(keys) else b"="
        if operation == "set":
            self._values[key] = value
        elif operation == "add":
            self._values[key] = str(int(self._values.get(key, b"0")) + argument).encode()
            return self._values[key]
        elif operation == "compare_set":
            if self._values.get(key, b"") == argument.encode():
                self._values[key] = value
            return self._values.get(key, b"")
        elif operation == "delete":
            self._values.pop(key, None)
        elif operation == "push":
            self._queues[key].append(value)
        elif operation == "pop":
            queue = self._queues.get(key)
            found = queue.popleft() if queue else None
            if not queue:
                self._queues.pop(key, None)
            return b"" if found is None else b"=" + found
        else:
            raise ValueError(f"the store has no operation {operation!r}")
        return b""


class Server:
    def __init__(self, secret: bytes):
        self.secret, self.table = secret, StoreTable()
        self.strangers: Strangers[Connection] = Strangers(lambda connection: connection.end(), PROOF_S)
        self.waiting: defaultdict[str, set[Connection]] = defaultdict(set)
        """Connections that wait for a key."""

    def wake(self, key: str) -> None:
        """Let the connections that wait for this key look again whether their wait is over."""
        for connection in self.waiting.pop(key, ()):
            connection.look()


class Connection(asyncio.Protocol):
    """One client of the server."""

    _transport: asyncio.Transport

    def __init__(self, server: Server):
        self._server, self._received, self._nonce = server, bytearray(), nonce()
        self._seals: tuple[Seal, Seal] | None = None
        """Proofs of received and of sent messages; None until the client has proved that it knows the key."""
        self._awaited: tuple[list[str], asyncio.TimerHandle] | None = None
        """Keys of a wait, and the end of its time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._nonce)
        self._server.strangers.admit(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.strangers.forget(self)
        if self._awaited is not None:
            self._stop_waiting()

    def end(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._seals is None and not self._take_proof():
            return
        while (message := self._next_message()) is not None:
            self._take(message)

    def _take_proof(self) -> bool:
        """Return whether the client has proved that it knows the key."""
        if len(self._received) < 2 * NUM_BYTES:
            return False
        theirs, found = bytes(self._received[:NUM_BYTES]), bytes(self._received[NUM_BYTES : 2 * NUM_BYTES])
        secret, nonces = self._server.secret, (self._nonce, theirs)
        if len(self._received) > 2 * NUM_BYTES or not is_proof(found, secret, TO_SERVER, *nonces):
            self.end()
            return False
        self._server.strangers.forget(self)
        self._received.clear()
        self._transport.write(proof(secret, TO_CLIENT, *nonces))
        received, sent = (Seal(secret, f"{label} message", *nonces) for label in (TO_SERVER, TO_CLIENT))
        self._seals = received, sent
        return True

    def _next_message(self) -> bytes | None:
        if len(self._received) < 4 or self._seals is None:
            return None
        end = 4 + int.from_bytes(self._received[:4], "big")
        if end > MAX_BYTES:
            self.end()
            return None
        if len(self._received) < end + NUM_BYTES:
            return None
        message, found = bytes(self._received[4:end]), bytes(self._received[end : end + NUM_BYTES])
        del self._received[: end + NUM_BYTES]
        if not hmac.compare_digest(found, self._seals[0].next(message)):
            self.end()
            return None
        return message

    def _take(self, message: bytes) -> None:
        """Carry out a request."""
        head, _, value = message.partition(b"\n")
        operation, keys, argument = json.loads(head)
        if operation == "wait":
            self._awaited = keys, asyncio.get_running_loop().call_later(argument, self._time_is_over)
            self.look()
            return
        self._send(self._server.table.answer(operation, keys, argument, value))
        if operation in ("set", "add", "compare_set", "push"):
            self._server.wake(keys[0])

    def look(self) -> None:
        """Answer a wait if all its keys exist; else wait for the first one that does not."""
        if self._awaited is None:
            return
        missing = self._server.table.missing(self._awaited[0])
        if missing is not None:
            self._server.waiting[missing].add(self)
            return
        self._stop_waiting()
        self._send(b"=")

    def _time_is_over(self) -> None:
        self._stop_waiting()
        self._send(b"")

    def _stop_waiting(self) -> None:
        assert self._awaited is not None
        (keys, timer), self._awaited = self._awaited, None
        timer.cancel()
        for key in keys:
            if self in (waiting := self._server.waiting.get(key, set())):
                waiting.discard(self)
                if not waiting:
                    del self._server.waiting[key]

    def _send(self, message: bytes) -> None:
        assert self._seals is not None
        self._transport.write(
            b"".join((len(message).to_bytes(4, "big"), message, self._seals[1].next(message)))
        )


async def serve(listener: socket.socket, secret: bytes) -> None:
    """Serve until standard input ends. It is a pipe from rank 0."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    store = Server(secret)
    await loop.create_server(lambda: Connection(store), sock=listener, backlog=1024)
    loop.add_reader(sys.stdin, ended.set)
    await ended.wait()


def main() -> None:
    """Serve at the socket; its descriptor is the last argument. The key is read from standard input."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Slurm and terminals send signals to all processes of a job; this one ends with rank 0.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    secret = os.read(sys.stdin.fileno(), NUM_BYTES)
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[-1])), secret))
