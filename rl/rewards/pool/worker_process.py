"""The scoring pool's side of a worker process (worker.py): its chunk of samples and its messages."""

import math
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl.rewards.pool.worker import MAX_LINE_BYTES
from rl.workers.process import WorkerProcess

ASYNC_GRACE_S = 2.0
"""Seconds after its own time-out until an async call counts as blocking the event loop."""


class ScoringWorker(WorkerProcess):
    """The pool's connection to a worker process."""

    noun = "scoring"
    max_line_bytes = MAX_LINE_BYTES

    ready_type = bool  # whether the reward functions are async

    def __init__(self, *arguments: Any, **limits: Any):
        """Start the process, see WorkerProcess. Raises OSError if that fails."""
        self.chunk: dict[int, None] = {}
        """Indices of the samples that are not answered, in order."""
        self.awaited: set[int] = set()
        """Indices in `chunk` that are called and awaited."""
        self.since = 0.0
        """time.monotonic() of the last answer, or of the start of the chunk."""
        super().__init__(*arguments, **limits)

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

    def is_valid(self, message: dict[str, Any]) -> bool:
        """Return whether a message is about a sample that is not answered."""
        index = message.get("i")
        if type(index) is not int or index not in self.chunk:
            return False
        if isinstance(message.get("error"), str):
            return True
        if message.get("waiting") is True:
            return index not in self.awaited
        values, texts = message.get("values"), (message.get("prediction"), message.get("feedback"))
        of = message.get("of")
        if not isinstance(values, dict) or "score" not in values or not isinstance(of, list) or not of:
            return False
        if type(of[0]) is not int or not all(text is None or isinstance(text, str) for text in texts):
            return False
        numbers = (*of[1:], *values.values())
        finite = all(type(value) is float and math.isfinite(value) for value in numbers)
        return finite and all(map(str.isprintable, values))
