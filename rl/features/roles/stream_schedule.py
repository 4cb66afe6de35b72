"""The schedule of the generators in a run with roles. The groups form an endless sequence, and a replica
sends each group when the group is complete.

Groups are numbered over all batches (`Batches`). The content of a batch depends only on the seed and on the
number of the batch. Version n of the policy learns from batch n. (If an algorithm needs several batches for
one step, the same version learns from all of them.) When the trainers announce batch n and weights of version
v, the generators may therefore begin batches up to n + lag with these weights, and no later batch. For
example, with `roles.lag=1` the message for batch 5 allows batches 5 and 6.

`roles.granularity` decides when a replica reads the next message: when all its samples are complete (batch),
when no turn is in progress (turn), or between two engine steps (group, sample). With `rollout.deterministic`
a replica reads each message, except the first, at a fixed engine step: `roles.refit_after_steps` steps after
it has completed its groups of the previous batch. The engine takes no step until the message has arrived.
Everything except the times then depends only on the seed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rl.config.needs import algorithm_of
from rl.config.schema import Config
from rl.data.batch import fingerprint
from rl.data.prompts import Prompt
from rl.features.roles.messages import Begin, NextBatch, TrainerMessage, TrainerMessages
from rl.rollout.events import Done, Event, Waiting, Weights
from rl.rollout.samples import Sample
from rl.rollout.sampling import seed_of
from rl.rollout.source import SampleSource, StartedSample

WAIT_S = 0.5
"""Maximum time that one call waits for a message, in seconds."""


@dataclass(frozen=True)
class Batches:
    """The numbers of the groups of each batch."""

    size: int
    """Number of prompts that a batch draws."""
    share: float = 1.0
    """Fraction of a batch's prompts that the policy responds to, counted from the first prompt
    (`teacher.student_share`)."""

    @classmethod
    def of_config(cls, config: Config) -> "Batches":
        rounds = (
            "dynamic_sampling" in algorithm_of(config).needs and config.dynamic_sampling.prompts_per_round
        )
        return cls(rounds or config.data.prompts_per_step, config.teacher.student_share)

    def first(self, batch: int) -> int:
        """Return the number of a batch's first group, rounded as in `rl.algorithms.distill.counts`."""
        return int(batch * self.size * self.share + 1e-6)

    def groups(self, batch: int) -> range:
        """Return the numbers of a batch's groups, for example 8 to 11 of batch 2 with `size` 4."""
        return range(self.first(batch), self.first(batch + 1))

    def of(self, group: int) -> int:
        """Return the batch of a group."""
        batch = int(group / (self.size * self.share))
        return batch + (group >= self.first(batch + 1)) - (group < self.first(batch))


def batch_purpose(batch: int) -> str:
    """Return the text from which the seeds of a batch are derived, if the batch begins before its step.

    For example, batch 4 has the text "train.5".
    """
    return f"train.{batch + 1}"


class StreamSchedule:
    """Starts the groups that a replica generates (a `Schedule`).

    Args:
        draw: draws the given number of prompts, and returns them; called once per batch.
        queue: gives this replica the numbers of its groups. With `rollout.deterministic` they are the numbers
            of `Batches`; otherwise 0 is the first group of batch `begin.batch`.
        send: takes the number of a group, the fingerprint of its prompt and its samples.
        take_over: claims one of the given items that belongs to a dead replica, and returns it; None if there
            is no such item.
    """

    def __init__(
        self,
        config: Config,
        begin: Begin,
        *,
        draw: Callable[[int], list[Prompt]],
        queue: Iterator[int],
        messages: TrainerMessages,
        send: Callable[[int, int, list[Sample]], None],
        take_over: Callable[[range], int | None] = lambda items: None,
    ):
        self._config, self._draw, self._queue, self._messages = config, draw, queue, messages
        self._send, self._take_over = send, take_over
        self._batches = batches = Batches.of_config(config)
        self._first = self._limit = batches.first(begin.batch)
        self._finished = begin.finished
        self._lag, self._granularity = config.roles.lag, config.roles.granularity
        self._group_size = config.rollout.samples_per_prompt
        self.together = 1 if self._granularity == "sample" else self._group_size
        self._next_batch = begin.batch
        """Number of the batch for which the trainers will wait when they send the next message."""
        self._purpose = ""
        self._prompts: dict[int, list[Prompt]] = {}
        self._num_drawn = begin.batch
        self._waiting: deque[StartedSample] = deque()
        """Samples of begun groups that wait for room in the engine."""
        self._held: int | None = None
        """The next group of this replica, if it was drawn from the queue."""
        self._open: dict[int, list[list[Sample]]] = {}
        """For each group that has begun and is not complete: the rows of each of its finished samples."""
        self._due_at: int | None = None
        """Engine step before which to read the next message, with `rollout.deterministic`."""
        self._next_message: NextBatch | None = None
        """A message that has been read and not yet applied. With granularity "turn" it is applied when no
        turn is in progress."""
        self.barrier: tuple[str, TrainerMessage] | None = None
        """Name and content of a message that ends the engine's run: any message except a `NextBatch`."""

    # Schedule ---------------------------------------------------------------------------------------------

    def next_samples(self) -> list[StartedSample]:
        if not self._waiting and not self._begin_abandoned() and not self._begin_group():
            return []
        return [self._waiting.popleft() for _ in range(min(self.together, len(self._waiting)))]

    def next_events(self, step: int, source: SampleSource) -> list[Event]:
        # If samples are open but no turn is running, read a message before starting anything. Otherwise the
        # time that environments take would decide whether the next turns, or further groups, begin before or
        # after the weights that are due at a fixed step.
        fills = source.num_open > 0 and not source.running
        events = [] if fills or self._next_message else source.fill()
        # Read at most one message, because the engine must take its weights before the next message can come.
        if not self.barrier and not self._next_message and self._reads_next(source.num_open, step):
            is_due = self._due_at is not None
            taken = self._messages.take(WAIT_S if is_due or not source.num_open else 0.0)
            if taken is None and is_due and source.num_open:
                return [*events, Waiting("weights")]
            if taken is not None:
                self._due_at = None
                if isinstance(taken[1], NextBatch):
                    self._next_message = taken[1]
                else:
                    self.barrier = taken
        if self._next_message and (self._granularity != "turn" or not source.running):
            events, fills = [*events, self._allow(self._next_message)], True
        if fills:
            events += source.fill()
        if self.barrier is not None and not source.num_open:
            return [Done()]
        return events

    def ended(self, start: StartedSample, rows: list[Sample]) -> None:
        place = start.group - self._batches.first(self._batches.of(start.group))
        samples = self._open[start.group]
        rows = rows or [Sample(place, start.number, (), "failed")]
        samples.append([replace(row, prompt=place) for row in rows])
        if len(samples) == self._group_size:
            del self._open[start.group]
            prompt = fingerprint([start.prompt.token_ids])
            self._send(start.group, prompt, [row for rows in samples for row in rows])

    # Messages ---------------------------------------------------------------------------------------------

    def _reads_next(self, num_open: int, step: int) -> bool:
        """Return whether to read the next message before engine step `step`."""
        if not num_open:
            return True
        if self._granularity == "batch" or not self._config.rollout.deterministic:
            return self._granularity != "batch"
        # Read it only if this replica has completed its groups of all batches before that batch.
        if min((*self._open, self._next_group())) < self._batches.first(self._next_batch):
            return False
        if self._due_at is None:
            self._due_at = step + self._config.roles.refit_after_steps
        return step >= self._due_at

    def _allow(self, message: NextBatch) -> Event:
        """Allow the groups of a message; return the event that takes its weights."""
        self._next_message = None
        self._next_batch = message.batch + 1
        self._limit = self._batches.first(message.limit)
        self._purpose = message.purpose
        return Weights(message.version)

    # Groups -----------------------------------------------------------------------------------------------

    def _begin_group(self) -> bool:
        """Begin the next group of this replica; return False if the messages do not allow it yet."""
        if self._next_group() >= self._limit:
            return False
        group, self._held = self._next_group(), None
        self._open_group(group)
        return True

    def _begin_abandoned(self) -> bool:
        """Begin a group of a replica that has died; return False if there is none."""
        awaited = self._batches.first(self._next_batch - 1)  # the trainers have all earlier groups
        items = range(max(0, awaited - self._first), self._limit - self._first)
        while (item := self._take_over(items)) is not None:
            if self._first + item not in self._finished:
                self._open_group(self._first + item)
                return True
        return False

    def _open_group(self, group: int) -> None:
        batch = self._batches.of(group)
        place = group - self._batches.first(batch)
        while self._num_drawn <= batch:
            self._prompts[self._num_drawn] = self._draw(self._batches.size)
            self._num_drawn += 1
        oldest = min(self._batches.of(min((*self._open, group))), self._next_batch - 1)
        for done in [number for number in self._prompts if number < oldest]:
            del self._prompts[done]
        # With a lag, a batch may begin before the trainers announce the step that learns from it.
        purpose = batch_purpose(batch) if self._lag else self._purpose
        seed = seed_of(self._config.run.seed, purpose, place)
        self._open[group] = []
        prompt = self._prompts[batch][place]
        self._waiting += [StartedSample(group, number, prompt, seed) for number in range(self._group_size)]

    def _next_group(self) -> int:
        """Return the next group of this replica, skipping groups that exist already."""
        while self._held is None or self._held in self._finished or self._held < self._first:
            item = next(self._queue)  # the queue has no end
            # With rollout.deterministic a fixed rule assigns groups by number, also after a resume. Otherwise
            # a counter assigns them, which begins at 0 in each start.
            self._held = item if self._config.rollout.deterministic else self._first + item
        return self._held
