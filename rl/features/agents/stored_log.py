"""Stores and reads event logs. A log holds the leader's events of one run of a replica's engine, and the
tokens that the engine sampled.

    <run.dir>/events/step_12/train.12_replica_0.events

`lockstep samples replay` repeats the generation from a log and compares the tokens. A file is compressed
plain data (`rl.runtime.plain_data`): sampling parameters, events and completions. A context that continues
an earlier request of its trajectory is stored without the tokens of the earlier request. For example, the
request of turn 2 has only the tokens after turn 1. With roles, one run of the engine may last as long as the
job. So each version of the weights has logs of its own (`VersionRecorder`).
"""

import gzip
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rl.rollout.events import EVENT_TYPES, Abort, Add, Done, Event, Source, Waiting, Weights
from rl.rollout.samples import COLUMNS, Completion, Request, Sample, Segment, pack, unpack
from rl.rollout.sampling import Sampling
from rl.runtime.plain_data import decode, encode

log = logging.getLogger(__name__)


class CompletionRecorder:
    """A `Source` that passes everything on to another source and keeps the completions that this source
    receives."""

    def __init__(self, source: Source):
        self._source = source
        self.completions: dict[str, Completion] = {}

    def next_events(self, num_live: int, step: int) -> list[Event]:
        return self._source.next_events(num_live, step)

    def receive(self, name: str, completion: Completion) -> None:
        self.completions[name] = completion
        self._source.receive(name, completion)


@dataclass
class _VersionPart:
    """Events and completions of a replica under one version of the weights."""

    version: int
    first_step: int
    path: Path
    begun: dict[str, Request]
    """Name -> request, for requests that began under older weights and continue. Once such a request has
    ended, the tokens that the older weights sampled are in its context."""
    records: list[tuple[int, list[Event]]] = field(default_factory=list)
    completions: dict[str, Completion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open = set(self.begun)
        """Names of the requests of this part that have not ended."""

    def note(self, step: int, events: list[Event]) -> None:
        self.open |= {event.request.name for event in events if isinstance(event, Add)}
        self.records += [(step - self.first_step, events)] * bool(events)

    def end(self, request: Request, completion: Completion) -> None:
        """Take the tokens that this version sampled for a request."""
        name, versions = request.name, completion.weight_versions
        self.open.remove(name)
        if name in self.begun:
            before = int((versions < self.version).sum())
            if before == len(versions) and completion.end != "abort":
                del self.begun[name]  # an engine step that began before these weights ended the request
                return
            ids = np.concatenate([request.token_ids, completion.token_ids[:before]])
            left, num_begun = request.max_tokens - before, request.num_begun + before
            self.begun[name] = replace(request, token_ids=ids, max_tokens=left, num_begun=num_begun)
        own = versions == self.version
        columns = {column: getattr(completion, column)[own] for column in COLUMNS}
        self.completions[name] = replace(completion, **columns, held={})

    def store(self, sampling: Sampling, is_async: bool) -> None:
        if self.completions:
            events: list[Event] = [Add(request) for request in self.begun.values()]
            if self.records and self.records[0][0] == 0:
                events += self.records.pop(0)[1]
            store(self.path, sampling, [(0, events), *self.records], self.completions, is_async)


class VersionRecorder:
    """A `Source` that passes everything on to another source and writes one log for each version of the
    weights.

    A request that continues under newer weights is aborted in the log of the older weights, and begins in the
    log of the newer weights with its tokens so far. A log is written when all its requests have ended.

    Args:
        version: version of the engine's weights.
        sampling: sampling parameters of all requests.
        path_of: returns the file of the next log of a version.
        is_async: as in `StoredLog`.
    """

    def __init__(
        self, source: Source, version: int, sampling: Sampling, path_of: Callable[[int], Path], is_async: bool
    ):
        self._source, self._sampling, self._path_of = source, sampling, path_of
        self._is_async = is_async
        self._live: dict[str, Request] = {}
        self._parts = [_VersionPart(version, 0, path_of(version), {})]
        """The logs that are not written yet. The last one belongs to the present weights."""

    def next_events(self, num_live: int, step: int) -> list[Event]:
        events = self._source.next_events(num_live, step)
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Weights) and event.version != self._parts[-1].version:
                self._parts[-1].note(step, [*kept, *map(Abort, self._live), Done()])
                self._parts.append(
                    _VersionPart(event.version, step, self._path_of(event.version), dict(self._live))
                )
                kept = []
            elif isinstance(event, Add):
                self._live[event.request.name] = event.request
            if not isinstance(event, Waiting | Weights):
                kept.append(event)
        self._parts[-1].note(step, kept)
        self._write(len(self._parts) - 1)
        return events

    def receive(self, name: str, completion: Completion) -> None:
        request = self._live.pop(name)
        for part in self._parts:
            if name in part.open:
                part.end(request, completion)
        self._source.receive(name, completion)

    def finish(self) -> None:
        """Write the remaining logs. Call it when a run of the engine is over and all its requests have
        ended."""
        self._write(len(self._parts))

    def _write(self, number: int) -> None:
        for part in [part for part in self._parts[:number] if not part.open]:
            part.store(self._sampling, self._is_async)
            self._parts.remove(part)


@dataclass(frozen=True)
class StoredLog:
    """One run of the engine on one replica."""

    sampling: Sampling
    records: list[tuple[int, list[Event]]]
    """Engine step and events of every record that is not empty."""
    completions: dict[str, Completion]
    is_async: bool
    """Value of `rollout.async_scheduling`. If true, the end of a request is seen one engine step later."""


def store(
    path: Path,
    sampling: Sampling,
    logged: list[tuple[int, list[Event]]],
    completions: dict[str, Completion],
    is_async: bool,
) -> None:
    """Write a log. If the process is killed meanwhile, no file with this name exists.

    logged: records in the form of `StoredLog.records`.
    """
    last: dict[str, Request] = {}
    bases: dict[str, str] = {}
    records = []
    for step, own in logged:
        entries: list[Event] = []
        for event in own:
            if isinstance(event, Add):
                request = event.request
                trajectory = request.name.rpartition(".")[0]
                base = last.get(trajectory)
                if base is not None and base.name in completions:
                    known = np.concatenate([base.token_ids, completions[base.name].token_ids])
                    if np.array_equal(request.token_ids[: len(known)], known):
                        bases[request.name] = base.name
                        event = Add(replace(request, token_ids=request.token_ids[len(known) :]))
                last[trajectory] = request
            entries.append(event)
        records.append((step, entries))
    samples = [Sample(0, 0, (Segment.of(c),), c.end) for c in completions.values()]
    content = [sampling, records, bases, list(completions), pack(samples, held=False), is_async]
    partial, data = path.with_suffix(".partial"), gzip.compress(encode(content, Sampling, *EVENT_TYPES), 6)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:  # for example, a full disk must not end the run
        # Logged as an error, because the log of the run shows only errors from ranks other than 0.
        log.error("warning: %s, %d bytes, is missing: %s", path, len(data), error.strerror)
        partial.unlink(missing_ok=True)


def load(path: Path) -> StoredLog:
    """Return the log that `store` wrote. Its completions have no held columns (`Completion.held`)."""
    content = decode(gzip.decompress(path.read_bytes()), Sampling, *EVENT_TYPES)
    sampling, records, bases, names, packed, is_async = content
    samples = zip(names, unpack(packed))
    completions = {name: Completion(s.token_ids, s.logprobs, s.end, s.weight_versions) for name, s in samples}
    requests: dict[str, Request] = {}

    def whole(event: Event) -> Event:
        if not isinstance(event, Add):
            return event
        request = event.request
        if base := bases.get(request.name):
            known = requests[base].token_ids, completions[base].token_ids
            request = replace(request, token_ids=np.concatenate([*known, request.token_ids]))
        requests[request.name] = request
        return Add(request)

    whole_records = [(step, list(map(whole, own))) for step, own in records]
    return StoredLog(sampling, whole_records, completions, is_async)


class Replay:
    """A `Source` that repeats the events of a stored log, each at its engine step."""

    def __init__(self, log: StoredLog):
        self._records = iter(log.records)
        self._next = next(self._records)
        self._expected, self._live = log.completions, set[str]()
        self.different: list[str] = []
        """Names of the completions whose token ids or log-probs are not bitwise equal to the stored ones."""
        self.num_tokens = 0
        """Number of tokens that were compared."""

    def next_events(self, num_live: int, step: int) -> list[Event]:
        at, events = self._next
        if at != step:
            # If nothing runs but the log continues at a later step, requests ended at other steps than in the
            # log.
            return [] if num_live else [Done(aborted=True)]
        self._next = next(self._records, (-1, []))
        self._live |= {event.request.name for event in events if isinstance(event, Add)}
        if any(isinstance(event, Abort) and event.name not in self._live for event in events):
            return [Done(aborted=True)]  # aborted in the log, but finished before that now
        return events

    def receive(self, name: str, completion: Completion) -> None:
        self._live.discard(name)
        expected = self._expected[name]
        self.num_tokens += len(expected.token_ids)
        if not (
            np.array_equal(completion.token_ids, expected.token_ids)
            and completion.logprobs.tobytes() == expected.logprobs.tobytes()
        ):
            self.different.append(name)
