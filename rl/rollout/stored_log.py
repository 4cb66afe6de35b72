"""A stored event log: the leader's events of one run of a replica's engine, and the tokens it sampled.

    <run.dir>/events/step_12/train.12_replica_0.npz

`tools/replay.py` repeats the generation from it and compares. A file has four arrays: `header` (JSON, UTF-8),
the token ids of contexts and of completions, and log-probs. A context that continues an earlier request of
its trajectory is stored without that request's tokens, so a turn takes about 100 bytes besides its tokens.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rl.rollout.events import Abort, Add, Done, Event, EventLog, Source, Weights
from rl.rollout.samples import Completion, Request
from rl.rollout.sampling import Sampling

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
    given: list[np.ndarray] = []
    last: dict[str, str] = {}
    requests: dict[str, Request] = {}
    records = []
    for step, own in events.records:
        entries: list[list] = []
        for event in own:
            match event:
                case Add(request):
                    trajectory = request.name.rpartition(".")[0]
                    base, kept = last.get(trajectory, ""), 0
                    if base in completions:
                        known = np.concatenate([requests[base].token_ids, completions[base].token_ids])
                        is_prefix = np.array_equal(request.token_ids[: len(known)], known)
                        kept = len(known) if is_prefix else 0
                    rest = request.token_ids[kept:]
                    limits = request.max_tokens, request.grammar
                    entries.append(["add", request.name, request.seed, *limits, base * bool(kept), len(rest)])
                    given.append(rest)
                    requests[request.name], last[trajectory] = request, request.name
                case Abort(name):
                    entries.append(["abort", name])
                case Weights(version):
                    entries.append(["weights", version])
                case Done(aborted):
                    entries.append(["done", aborted])
        records.append([step, entries])
    ends = [[name, len(c.token_ids), c.end] for name, c in completions.items()]
    header = {"sampling": asdict(sampling), "records": records, "completions": ends}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(
            file,
            header=np.frombuffer(json.dumps(header).encode(), np.uint8),
            given=_joined(given, np.int32),
            sampled=_joined([c.token_ids for c in completions.values()], np.int32),
            logprobs=_joined([c.logprobs for c in completions.values()], np.float32),
        )
    partial.replace(path)


def load(path: Path) -> StoredLog:
    """Return what `store` wrote; the completions have no weight versions."""
    with np.load(path) as arrays:
        header = json.loads(arrays["header"].tobytes())
        given, sampled, logprobs = arrays["given"], arrays["sampled"], arrays["logprobs"]
    lengths = [length for _, length, _ in header["completions"]]
    parts = zip(header["completions"], _cut(sampled, lengths), _cut(logprobs, lengths))
    none = np.zeros(0, np.int32)
    completions = {name: Completion(ids, own, end, none) for (name, _, end), ids, own in parts}
    rests = iter(_cut(given, [e[-1] for _, entries in header["records"] for e in entries if e[0] == "add"]))
    requests: dict[str, Request] = {}
    records = [
        (step, [_event(entry, rests, requests, completions) for entry in entries])
        for step, entries in header["records"]
    ]
    sampling = header["sampling"]
    sampling |= {name: tuple(value) for name, value in sampling.items() if isinstance(value, list)}
    return StoredLog(Sampling(**sampling), records, completions)


def _event(
    entry: list, rests: Iterator[np.ndarray], requests: dict[str, Request], completions: dict[str, Completion]
) -> Event:
    """Return the event of an entry; a request is added to `requests`."""
    kind, *values = entry
    if kind != "add":
        return {"abort": Abort, "weights": Weights, "done": Done}[kind](*values)
    name, seed, max_tokens, grammar, base, _ = values
    before = [requests[base].token_ids, completions[base].token_ids] if base else []
    requests[name] = Request(name, np.concatenate([*before, next(rests)]), seed, max_tokens, grammar)
    return Add(requests[name])


def _joined(parts: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def _cut(values: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1]) if lengths else []


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
