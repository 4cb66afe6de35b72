"""Messages of the trainers to the generators. They lie in the job's store, and each replica reads them in
order."""

from dataclasses import dataclass
from typing import Any

from rl.data.prompts import Prompt
from rl.rollout.sampling import Sampling
from rl.runtime.job_store import JobStore
from rl.runtime.plain_data import decode, encode


@dataclass(frozen=True)
class Begin:
    """The first message. It describes the state of the run when the generators start."""

    cursor: dict[str, Any]
    """State of the order of prompts before batch `batch` is drawn."""
    batch: int
    """Number of the first batch that the policy has not learned from. The run's first batch has number 0."""
    finished: frozenset[int]
    """Numbers of groups whose samples the trainers have already, for example from a checkpoint. These groups
    belong to batch `batch` or to later batches."""


@dataclass(frozen=True)
class NextBatch:
    """Says which batch the trainers wait for, and which batches may begin."""

    step: int
    version: int
    """Version of the weights. If the previous message had another version, the trainers are sending the
    weights of this one."""
    batch: int
    """Number of the batch that the trainers wait for."""
    limit: int
    """Number of the first batch that may not begin yet: for example, 7 for batch 5 with roles.lag=1."""
    purpose: str
    """Text from which the seeds of this batch are derived if `roles.lag` is 0. With a lag, a text made of the
    batch's number is used instead (`stream_schedule.batch_purpose`)."""


@dataclass(frozen=True)
class Generate:
    """Tells the generators to answer these prompts, after they have completed all groups that may begin."""

    step: int
    version: int
    prompts: list[Prompt]
    sampling: Sampling
    seeds: list[int]
    keeps_failed: bool
    """Whether a trajectory with a failed environment is returned as a sample."""


@dataclass(frozen=True)
class Complete:
    """Tells the generators to complete all groups that may begin, with the present weights."""


TrainerMessage = Begin | NextBatch | Generate | Complete

MESSAGE_TYPES = (Begin, NextBatch, Generate, Complete, Sampling, Prompt)
"""Types that a message may contain."""

_END = "end"


class TrainerMessages:
    """Sends or reads the messages of one start of a job. Not collective.

    Args:
        store: the job's store; this object opens a connection of its own.
    """

    def __init__(self, store: JobStore):
        self._store = store.clone("messages")
        self._number = 0

    def put(self, message: TrainerMessage) -> str:
        """Send the next message; return its name."""
        name = self.skip()
        self._store.set(name, encode(message, *MESSAGE_TYPES))
        return name

    def skip(self) -> str:
        """Count the next message, which another trainer sends, and return its name."""
        self._number += 1
        return str(self._number - 1)

    def take(self, timeout_s: float = 0.0) -> tuple[str, TrainerMessage] | None:
        """Return the name and the content of the next message; None if none came within `timeout_s`."""
        name = str(self._number)
        if timeout_s:
            self._store.wait([name], timeout_s)
        if (content := self._store.get(name)) is None:
            return None
        self._number += 1
        return name, decode(content, *MESSAGE_TYPES)

    def end(self, code: int) -> None:
        """End the generators at once, whatever they generate. code: exit code of the run."""
        self._store.set(_END, str(code))

    def exit_code(self) -> int | None:
        """Return the exit code that `end` was called with; None if it was not called."""
        code = self._store.get(_END)
        return None if code is None else int(code)

    def remove(self, name: str) -> None:
        """Remove a message that every replica has read."""
        self._store.delete(name)
