"""A stored event log: the leader's events of one run of a replica's engine, and the tokens it sampled.

    <run.dir>/events/step_12/train.12_replica_0.events

`tools/replay.py` repeats the generation from it and compares. A file is compressed plain data
(`rl.runtime.plain_data`): sampling, events and completions. A context that continues an earlier request of
its trajectory is stored without that request's tokens.
"""

import gzip
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rl.rollout.events import EVENT_TYPES, Abort, Add, Done, Event, EventLog, Source
from rl.rollout.samples import Completion, Request, Sample, Segment, pack, unpack
from rl.rollout.sampling import Sampling
from rl.runtime.plain_data import decode, encode

DIRECTORY = "events"


def remove_after(run_dir: str, step: int) -> None:
    """Remove the logs of steps after `step`: a resumed run repeats them, perhaps with fewer replicas."""
    for directory in Path(run_dir, DIRECTORY).glob("step_*"):
        if int(directory.name.removeprefix("step_")) > step:
            shutil.rmtree(directory)


class Recorder:
    """Keeps the completions that a source receives (a `Source`)."""

    def __init__(self, source: Source):
        self._source = source
        self.completions: dict[str, Completion] = {}

    def next_events(self, num_live: int, step: int) -> list[Event]:
        return self._source.next_events(num_live, step)

    def receive(self, name: str, completion: Completion) -> None:
        self.completions[name] = completion
        self._source.receive(name, completion)


@dataclass(frozen=True)
class StoredLog:
    """One run of the engine on one replica."""

    sampling: Sampling
    records: list[tuple[int, list[Event]]]
    """Engine step and events of every record that is not empty."""
    completions: dict[str, Completion]


def store(path: Path, sampling: Sampling, events: EventLog, completions: dict[str, Completion]) -> None:
    """Write the log of a run that has ended. A killed process leaves no file of that name."""
    last: dict[str, Request] = {}
    bases: dict[str, str] = {}
    records = []
    for step, own in events.records:
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
    content = [sampling, records, bases, list(completions), pack(samples, held=False)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(gzip.compress(encode(content, Sampling, *EVENT_TYPES), 6))
    partial.replace(path)


def load(path: Path) -> StoredLog:
    """Return what `store` wrote; the completions have no values of held columns."""
    content = decode(gzip.decompress(path.read_bytes()), Sampling, *EVENT_TYPES)
    sampling, records, bases, names, packed = content
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

    return StoredLog(sampling, [(step, list(map(whole, own))) for step, own in records], completions)


class Replay:
    """Repeats the events of a stored log at their engine steps (a `Source`)."""

    def __init__(self, log: StoredLog):
        self._records = iter(log.records)
        self._next = next(self._records)
        self._expected, self._live = log.completions, set[str]()
        self.different: list[str] = []
        """Names of the completions whose ids or log-probs differ from the stored ones in any bit."""
        self.num_tokens = 0
        """Number of tokens that were compared."""

    def next_events(self, num_live: int, step: int) -> list[Event]:
        at, events = self._next
        if at != step:
            # Nothing runs, but the log continues later: the engine finished at other steps than before.
            return [] if num_live else [Done(aborted=True)]
        self._next = next(self._records, (-1, []))
        self._live |= {event.request.name for event in events if isinstance(event, Add)}
        if any(isinstance(event, Abort) and event.name not in self._live for event in events):
            return [Done(aborted=True)]  # it has finished before the step at which it was aborted
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
