"""Messages of the trainers to the generators in the job's store, which each replica reads in order."""

from dataclasses import dataclass
from typing import Any

from rl.data.prompts import Prompt
from rl.rollout.sampling import Sampling
from rl.runtime.job_store import JobStore
from rl.runtime.plain_data import decode, encode


@dataclass(frozen=True)
class Begin:
    """The first message: the state of the run when the generators start."""

    cursor: dict[str, Any]
    """State of the sampler of prompts before batch `batch`."""
    batch: int
    """Number of the first batch that was not learned from, counted from the beginning of the run."""
    finished: frozenset[int]
    """Numbers of groups from that batch on that exist already."""


@dataclass(frozen=True)
class NextBatch:
    """Says which batch the trainers wait for, and which batches may begin."""

    step: int
    version: int
    """Version of the weights; if the message before had another version, the weights are being sent."""
    batch: int
    """Number of the batch that the trainers wait for."""
    limit: int
    """Number of the first batch that may not begin yet: for example, 7 for batch 5 with roles.lag=1."""
    purpose: str
    """Part of the seeds of this batch with `roles.lag` 0; with a lag the batch's number is used."""


@dataclass(frozen=True)
class Generate:
    """Generate responses to these prompts, after all groups that may begin are complete."""

    step: int
    version: int
    prompts: list[Prompt]
    sampling: Sampling
    seeds: list[int]
    keeps_failed: bool
    """Whether a trajectory with a failed environment is a sample."""


@dataclass(frozen=True)
class Complete:
    """Complete all groups that may begin, with the present weights."""


TrainerMessage = Begin | NextBatch | Generate | Complete

MESSAGE_TYPES = (Begin, NextBatch, Generate, Complete, Sampling, Prompt)
"""Types that a message may contain."""

_END = "end"


class TrainerMessages:
    """The messages of one start of a job. Not collective.

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
        """Return the name of the next message, which another trainer sends."""
        self._number += 1
        return str(self._number - 1)

    def take(self, timeout_s: float = 0.0) -> tuple[str, TrainerMessage] | None:
        """Return the name and the content of the next message, None if none came within `timeout_s`."""
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
        """Return the argument of `end`, None if it was not called."""
        code = self._store.get(_END)
        return None if code is None else int(code)

    def remove(self, name: str) -> None:
        """Remove a message that every replica has read."""
        self._store.delete(name)
