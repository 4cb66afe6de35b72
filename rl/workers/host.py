"""The host: the process of a worker that imports and calls users' code."""

import json
import os
import pickle
import socket
import sys
from abc import ABC, abstractmethod
from typing import Any

from rl.workers.messages import MAX_ERROR_CHARS, encodable, explain


class Host(ABC):
    """The host's connection to its pool.

    It receives pickles, first (plan, sys.path or None). It sends JSON lines, first {"ready": value}, or
    {"unloadable": sentence, "traceback": text} if the plan cannot be loaded.
    """

    def __init__(self, work: socket.socket):
        self._work, self._stream = work, work.makefile("rb")
        self._pid = os.getpid()

    @abstractmethod
    def load(self, plan: Any) -> Any:
        """Import users' code, and return what the pool gets to know of it."""

    @abstractmethod
    def serve_requests(self) -> None:
        """Serve the pool's requests until it closes the socket."""

    def serve(self) -> None:
        """Load the plan, and serve the pool's requests until it closes the socket."""
        plan, path = self.receive()
        sys.path[:] = path or sys.path
        try:
            ready = self.load(plan)
        except BaseException as error:  # an import runs users' code, which may call exit()
            sentence = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            sentence = encodable(sentence[:MAX_ERROR_CHARS])
            return self.send({"unloadable": sentence, "traceback": explain(error)})
        self.send({"ready": ready})
        self.serve_requests()

    def receive(self) -> Any:
        """Return the next pickle of the pool. Raises EOFError if the pool has closed the socket."""
        return pickle.load(self._stream)

    def send(self, message: dict[str, Any]) -> None:
        self.exit_in_forks()
        self._work.sendall(json.dumps(message).encode() + b"\n")

    def exit_in_forks(self) -> None:
        """End a process that users' code forked and that returned from its call; only the parent answers."""
        if os.getpid() != self._pid:
            os._exit(0)
