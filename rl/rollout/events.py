"""The event log of a replica: its leader's decisions, which all of its ranks apply at the same engine step.

The ranks of a replica must give vLLM the same requests, aborts and weights before the same engine step, or
their collectives no longer match. Only the leader (the replica's first rank) sees queues, clocks and
environments. It writes its decisions as events, and broadcasts them as one record: for example, "add request
5, abort request 2" before engine step 40. Everything else that an engine does is a function of these records,
so a stored log repeats a generation exactly.
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from rl.rollout.samples import Completion, Request
from rl.runtime.plain_data import decode, encode

INTERVAL = 8
"""Number of engine steps between two records while no request finishes."""

_FIRST_BYTES = 4096
"""Size of a record's first message. It holds the record's length and, for most records, the whole record."""


@dataclass(frozen=True)
class Add:
    """Begin a request."""

    request: Request


@dataclass(frozen=True)
class Abort:
    """End a request; the source receives its tokens so far as a completion."""

    name: str


@dataclass(frozen=True)
class Weights:
    """Take the weights of this version of the policy."""

    version: int


@dataclass(frozen=True)
class Done:
    """End the run of the engine. Requests that still run are dropped."""

    aborted: bool = False


@dataclass(frozen=True)
class Waiting:
    """Take no step, because the source waits for something.

    The source waits for environments while nothing runs, or for weights due at a fixed engine step. The event
    is repeated until the wait is over, and it is not stored.
    """

    text: str
    """Name of the awaited thing, for the report of a hang."""


@dataclass(frozen=True)
class DummySteps:
    """Engine steps that the replica took without having requests.

    The replica took these steps because other replicas that share its experts had requests
    (`rl.rollout.dp_attention`). The log records the steps, but no leader decides them.
    """

    num_steps: int


Event = Add | Abort | Weights | Done | Waiting | DummySteps

EVENT_TYPES = (Add, Abort, Weights, Done, Waiting, DummySteps, Request)
"""Types that a record may contain."""


class Source(Protocol):
    """Decides on a replica's leader what the engine generates."""

    def next_events(self, num_live: int, step: int) -> list[Event]:
        """Return the events before engine step `step`; [] if nothing changes.

        The call may block only if nothing runs (`num_live` is 0) or if it returns `Waiting`, and for at most
        a second.
        """

    def receive(self, name: str, completion: Completion) -> None:
        """Take the completion of the request `name`; after an Abort with the tokens so far."""


class EventLog:
    """The records of one run of the engine on this rank.

    Args:
        group: the ranks of the replica, on gloo.
        keep_records: whether to fill `records`, which grow with every request.
    """

    def __init__(self, group: dist.ProcessGroup, *, keep_records: bool = True):
        self._group, self._keep_records = group, keep_records
        self._hash = hashlib.blake2b(digest_size=8)
        self.records: list[tuple[int, list[Event]]] = []
        """Engine step and events of every record that is not empty."""

    def share(self, events: list[Event], step: int) -> list[Event]:
        """Return the leader's events; `events` of other ranks are ignored. Collective over the replica."""
        if self._group.size() > 1:
            leads = self._group.rank() == 0
            payload = self._broadcast(encode(events, *EVENT_TYPES) if leads and events else b"")
            if not leads:
                events = decode(payload, *EVENT_TYPES) if payload else []
            self._hash.update(payload)
        kept: list[Event] = [event for event in events if not isinstance(event, Waiting)]
        if kept and self._keep_records:
            self.records.append((step, kept))
        return events

    def note_dummy_step(self) -> None:
        """Add a dummy step to the hash, and to the records behind the last record."""
        self._hash.update(b"dummy")
        if not self._keep_records:
            return
        step, events = self.records[-1] if self.records else (0, [])
        match events:
            case [DummySteps(num_steps)]:
                self.records[-1] = (step, [DummySteps(num_steps + 1)])
            case _:
                self.records.append((step, [DummySteps(1)]))

    def note(self, name: str, token_ids: np.ndarray) -> None:
        """Add a completion of this rank's engine to the hash."""
        self._hash.update(name.encode())
        self._hash.update(token_ids.tobytes())

    @property
    def digest(self) -> int:
        """Hash of the records and of this rank's completions, 63 bits; equal on all ranks of the replica."""
        return int.from_bytes(self._hash.digest(), "little") >> 1

    def _broadcast(self, payload: bytes) -> bytes:
        """Return the leader's payload: one message, and a second one if it is long."""
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        if self._group.rank() == 0:
            start = len(payload).to_bytes(8, "little") + payload[: _FIRST_BYTES - 8]
            first[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        dist.broadcast(first, group=self._group, group_src=0)
        head = first.numpy().tobytes()
        length = int.from_bytes(head[:8], "little")
        if length <= _FIRST_BYTES - 8:
            return head[8 : 8 + length]
        rest = torch.zeros(length - (_FIRST_BYTES - 8), dtype=torch.uint8)
        if self._group.rank() == 0:
            rest = torch.frombuffer(bytearray(payload[_FIRST_BYTES - 8 :]), dtype=torch.uint8)
        dist.broadcast(rest, group=self._group, group_src=0)
        return head[8:] + rest.numpy().tobytes()
