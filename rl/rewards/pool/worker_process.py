"""The scoring pool's side of a worker process (worker.py): its chunk of samples and its messages."""

import json
import math
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl.rewards.pool.worker import MAX_LINE_BYTES
from rl.workers.messages import too_slow
from rl.workers.process import WorkerProcess

ASYNC_GRACE_S = 2.0
"""Seconds after its own time-out at which an async call counts as blocking the event loop."""


class ScoringWorker(WorkerProcess):
    """The pool's connection to a worker process."""

    noun = "scoring"
    max_line_bytes = MAX_LINE_BYTES

    def __init__(self, initialization: bytes, options: Mapping[str, Any], **limits: Any):
        """Start the process. Raises OSError if that fails."""
        self.chunk: dict[int, None] = {}
        """Indices of the samples that are not answered, in order."""
        self.awaited: set[int] = set()
        """Indices in `chunk` that are called and awaited."""
        self.is_async = False
        self.since = 0.0
        """time.monotonic() of the last answer, or of the start of the chunk."""
        # -P: the run directory may hold a random.py. The worker sets sys.path after its own imports.
        command = [sys.executable, "-P", "-m", "rl.rewards.pool.worker"]
        super().__init__(command, initialization, options, **limits)

    @property
    def is_free(self) -> bool:
        return self.is_ready and not self.chunk and not self.sweeping and not self.is_disconnected

    def assign(self, indices: list[int], samples: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
        self.chunk, self.awaited, self.since = dict.fromkeys(indices), set(), time.monotonic()
        self.set_deadline(timeout_s)
        self.send(pickle.dumps([(i, dict(samples[i])) for i in indices]))

    def set_deadline(self, timeout_s: float) -> None:
        """Set the deadline of the next answer."""
        if not self.chunk:
            self.deadline = math.inf
        elif len(self.awaited) < len(self.chunk):
            self.deadline = time.monotonic() + timeout_s
        else:
            self.deadline = time.monotonic() + timeout_s + ASYNC_GRACE_S

    def describe_lateness(self, timeout_s: float) -> str:
        """Return why the deadline has passed, for the log."""
        if self.is_ready and not self.is_disconnected:
            return too_slow(timeout_s) + ", and its process was killed"
        return self.describe_timeout()

    def validated(self, line: bytes) -> dict[str, Any] | None:
        """Parse a message of the host; return None if it is invalid: users' code may have written it."""
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
        if not isinstance(values, dict) or "score" not in values or type(message.get("of")) is not int:
            return None
        if not all(text is None or isinstance(text, str) for text in (prediction, message.get("feedback"))):
            return None
        finite = all(type(value) is float and math.isfinite(value) for value in values.values())
        return message if finite and all(map(str.isprintable, values)) else None
