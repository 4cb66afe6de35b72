"""The samples of a replica: a schedule starts samples, and each sample proceeds as a dialogue.

    schedule    which samples start next, when the engine takes weights, and when it is done
    dialogue    how one sample proceeds: one turn, or a trajectory with an environment

`SampleSource` joins one schedule with one dialogue, on the replica's leader. Schedules are `queue_schedule`,
`quota_schedule` (carry-over) and `stream_schedule` (roles). Dialogues are `single_turn`, and trajectories
with environments. Every schedule works with every dialogue; `rl.config.exclusions` says which pairs a run may
have.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from rl.data.prompts import Prompt
from rl.rollout.events import Add, Event, Waiting
from rl.rollout.samples import Completion, Request, Sample
from rl.run_directory import progress as bars


@dataclass(frozen=True)
class StartedSample:
    """A sample that a replica generates."""

    group: int
    """Number of its group in the schedule."""
    number: int
    """Index of the sample in its group."""
    prompt: Prompt
    seed: int
    """Seed of the group. Sample `number` has `seed_of(seed, number)`, whichever replica draws it."""
    adapter: int = 0
    """Index of the adapter that generates, in an engine that has several."""
    so_far: tuple[Sample, ...] = ()
    """The sample's rows before it was interrupted."""
    next_number: int = 0
    """Next unused number of a sample in the group; 0 means samples_per_prompt."""


class Schedule(Protocol):
    """Decides which samples a replica generates, and when."""

    together: int
    """Maximum number of samples that start at the same time, when the engine has room for all of them."""

    def next_samples(self) -> list[StartedSample]:
        """Return the samples that start next, [] if none may start now."""

    def next_events(self, step: int, source: "SampleSource") -> list[Event]:
        """Return the events before engine step `step`, including the events of `source.fill`."""

    def ended(self, start: StartedSample, rows: list[Sample]) -> None:
        """Take the rows of a sample that has ended, or was aborted; [] if its environment failed."""


class Dialogue:
    """Turns samples into requests of the engine, and completions into samples."""

    def __init__(self) -> None:
        self.ended: list[tuple[StartedSample, list[Sample]]] = []
        """Samples that have ended, with their rows. The source empties the list."""
        self.counts: Counter[str] = Counter()
        """Sums over the samples, by the name of a metric; times in whole microseconds."""

    @property
    def num_open(self) -> int:
        """Number of samples that have started and not ended."""
        raise NotImplementedError

    def has_room(self, num_live: int, together: int) -> bool:
        """Return whether `together` samples may start. num_live: number of requests in the engine."""
        raise NotImplementedError

    def start(self, start: StartedSample) -> None:
        """Start a sample."""
        raise NotImplementedError

    def requests(self, num_live: int) -> list[Request]:
        """Return the requests that begin now."""
        raise NotImplementedError

    def receive(self, name: str, completion: Completion) -> None:
        """Take the completion of the request `name`; after an abort with the tokens so far."""
        raise NotImplementedError

    def suspend(self) -> None:
        """Add the rows of all samples that have not ended to `ended`; another dialogue may continue them."""

    # What is outside of the engine, if anything is ----------------------------------------------------------

    def advance(self, num_live: int, step: int) -> list[Event]:
        """Take what has arrived before engine step `step`; return requests to abort."""
        return []

    def wait(self, num_live: int) -> bool:
        """Wait if the next requests depend on something that `advance` takes, for at most a second.

        Returns whether it waited.
        """
        return False

    def describe_wait(self) -> str:
        """Return the name of the awaited thing while nothing runs, for the report of a hang."""
        return ""


class SampleSource:
    """Generates the samples of a schedule as dialogues (`rl.rollout.events.Source`).

    progress: its `update` is called with the number of samples that ended.
    """

    def __init__(self, schedule: Schedule, dialogue: Dialogue, *, progress: bars.Counter | None = None):
        self._schedule, self._dialogue, self._progress = schedule, dialogue, progress
        self._num_live = 0
        self.running: dict[str, None] = {}
        """Names of the requests in the engine, the oldest first."""

    @property
    def num_open(self) -> int:
        """Number of samples that have started and not ended."""
        return self._dialogue.num_open

    def next_events(self, num_live: int, step: int) -> list[Event]:
        self._num_live = num_live
        events = self._dialogue.advance(num_live, step)
        self._take_ended()
        if events:
            return events
        events = self._schedule.next_events(step, self)
        if not events and not num_live and self.num_open:
            return [Waiting(self._dialogue.describe_wait())]
        return events

    def fill(self) -> list[Event]:
        """Return the events that start and continue samples, as far as the engine has room."""
        self._start_samples()
        if self._dialogue.wait(self._num_live):
            return []
        requests = self._dialogue.requests(self._num_live)
        self._num_live += len(requests)
        self.running |= dict.fromkeys(request.name for request in requests)
        return [Add(request) for request in requests]

    def receive(self, name: str, completion: Completion) -> None:
        self.running.pop(name, None)
        self._dialogue.receive(name, completion)
        self._take_ended()

    def suspend(self) -> None:
        """End a run of the engine before all samples have ended: the schedule takes their rows."""
        self._dialogue.suspend()
        self._take_ended()

    def _start_samples(self) -> None:
        schedule, dialogue = self._schedule, self._dialogue
        while dialogue.has_room(self._num_live, schedule.together):
            if not (starts := schedule.next_samples()):
                break
            for start in starts:
                dialogue.start(start)

    def _take_ended(self) -> None:
        ended, self._dialogue.ended = self._dialogue.ended, []
        for start, rows in ended:
            self._schedule.ended(start, rows)
            if self._progress is not None and not any(row.is_unfinished for row in rows):
                self._progress.update(1)
