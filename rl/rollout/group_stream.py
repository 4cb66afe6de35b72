"""The source of the generators of a run with roles: an endless sequence of groups, sent as they complete.

Group g is prompt g % P of batch g // P, with P prompts in a batch. A batch is a function of the seed and its
number. Version n of the policy learns from batch n. (If an algorithm needs several batches for one step, the
same version learns from all of them.) The trainers' message for batch n under version v therefore allows the
generators to begin batches up to n + lag with weights v, and no later one.

`roles.granularity` decides when a replica reads the next message: when all its samples are complete (batch),
or between two engine steps (group, sample). With `rollout.deterministic` those two read it a fixed number of
engine steps after the replica's last sample of the batch before. The engine takes no step until it has come,
so that everything but the clock is a function of the seed.
"""

from collections import deque
from collections.abc import Callable, Hashable

import numpy as np

from rl.config.schema import Config, algorithm_of
from rl.data.batch import fingerprint
from rl.rollout.asks import Ask, Asks, Begin, NextBatch
from rl.rollout.events import Add, Done, Event, Waiting, Weights
from rl.rollout.queue import Queue
from rl.rollout.samples import Completion, Request, Sample, Segment
from rl.rollout.sampling import seed_of, train_sampling

WAIT_S = 0.5
"""Longest wait for a message in one call, in seconds."""


def batch_size(config: Config) -> int:
    """Return the number of prompts of a batch: those of one call of `Phases.draw_prompts`."""
    rounds = "dynamic_sampling" in algorithm_of(config).needs and config.dynamic_sampling.prompts_per_round
    return rounds or config.data.prompts_per_step


def batch_purpose(batch: int) -> str:
    """Return what distinguishes the seeds of a batch that begins before its step."""
    return f"train.{batch + 1}"


class GroupStream:
    """The groups that a replica generates (a `Source`), on its leader.

    Args:
        draw: returns the token ids of the prompts of the next batch.
        queue: gives this replica its groups; without `rollout.deterministic` counted from batch
            `begin.batch`.
        capacity: maximum number of concurrent requests.
        send: takes the key (number of the group, fingerprint of its prompt) and the samples of a group.
        take_over: returns one of these items of the queue that a dead replica began, None if there is none.
    """

    def __init__(
        self,
        config: Config,
        begin: Begin,
        *,
        draw: Callable[[int], list[np.ndarray]],
        queue: Queue,
        capacity: int,
        asks: Asks,
        send: Callable[[Hashable, list[Sample]], None],
        take_over: Callable[[range], int | None] = lambda items: None,
    ):
        self._config, self._draw, self._queue, self._asks, self._send = config, draw, queue, asks, send
        self._take_over = take_over
        self._sampling, self._size = train_sampling(config), batch_size(config)
        self._first = self._limit = begin.batch * self._size
        self._finished = begin.finished
        self._lag, self._granularity = config.roles.lag, config.roles.granularity
        self._capacity = capacity
        self._next_batch = begin.batch
        """Number of the batch of the next message."""
        self._purpose = ""
        self._prompts: dict[int, list[np.ndarray]] = {}
        self._num_drawn = begin.batch
        self._waiting: deque[Request] = deque()
        """Requests of groups that have begun, which the engine has no room for yet."""
        self._held: int | None = None
        """The next group of this replica, if it was drawn from the queue."""
        self._open: dict[int, list[Sample]] = {}
        """Finished samples of the groups that have begun."""
        self._due_at: int | None = None
        self.barrier: tuple[str, Ask] | None = None
        """The message that ended the engine's run, with its name: any but a `NextBatch`."""

    # Source -----------------------------------------------------------------------------------------------

    def next_events(self, num_live: int, step: int) -> list[Event]:
        events = self._begin_samples(num_live)
        # At most one message: its weights must be taken before the next one can come.
        if self.barrier is None and self._reads_next(num_live + len(events), step):
            is_due = self._due_at is not None
            taken = self._asks.take(WAIT_S if is_due or not num_live + len(events) else 0.0)
            if taken is None:
                return [*events, Waiting("weights")] if is_due and num_live + len(events) else events
            self._due_at = None
            if isinstance(taken[1], NextBatch):
                begun = len(events)
                events += self._allow(taken[1])
                events += self._begin_samples(num_live + begun)
            else:
                self.barrier = taken
        if self.barrier is not None and not (num_live or events):
            return [Done()]
        return events

    def receive(self, name: str, completion: Completion) -> None:
        group, number = map(int, name.split("."))
        place = group % self._size
        samples = self._open[group]
        segments, digest = (Segment.of(completion),), completion.context_digest
        samples.append(Sample(place, number, segments, completion.end, context_digest=digest))
        if len(samples) == self._sampling.samples_per_prompt:
            del self._open[group]
            prompt = self._prompts[group // self._size][place]
            self._send((group, fingerprint([prompt])), samples)

    # Messages ---------------------------------------------------------------------------------------------

    def _reads_next(self, num_live: int, step: int) -> bool:
        """Return whether to read the next message before engine step `step`."""
        if not num_live:
            return True
        if self._granularity == "batch" or not self._config.rollout.deterministic:
            return self._granularity != "batch"
        # This replica's groups of the batches before that of the next message are complete.
        if min((*self._open, self._next_group())) < self._next_batch * self._size:
            return False
        if self._due_at is None:
            self._due_at = step + self._config.roles.refit_after_steps
        return step >= self._due_at

    def _allow(self, ask: NextBatch) -> list[Event]:
        """Allow the groups of a message; return the event that takes its weights."""
        self._next_batch = ask.batch + 1
        self._limit = ask.limit * self._size
        self._purpose = ask.purpose
        return [Weights(ask.version)]

    # Samples ----------------------------------------------------------------------------------------------

    def _begin_samples(self, num_live: int) -> list[Event]:
        """Return the events that fill the engine."""
        events: list[Event] = []
        n = 1 if self._granularity == "sample" else self._sampling.samples_per_prompt
        while num_live + len(events) + n <= self._capacity:
            if not self._waiting and not self._begin_abandoned() and not self._begin_group():
                break
            events += [Add(self._waiting.popleft()) for _ in range(min(n, len(self._waiting)))]
        return events

    def _begin_group(self) -> bool:
        """Begin the next group of this replica; return False if none is allowed yet."""
        if self._next_group() >= self._limit:
            return False
        group, self._held = self._next_group(), None
        self._open_group(group)
        return True

    def _begin_abandoned(self) -> bool:
        """Begin a group of a replica that has died; return False if there is none."""
        awaited = (self._next_batch - 1) * self._size  # the trainers have all groups before it
        items = range(max(0, awaited - self._first), self._limit - self._first)
        while (item := self._take_over(items)) is not None:
            if self._first + item not in self._finished:
                self._open_group(self._first + item)
                return True
        return False

    def _open_group(self, group: int) -> None:
        batch, place = divmod(group, self._size)
        while self._num_drawn <= batch:
            self._prompts[self._num_drawn] = self._draw(self._size)
            self._num_drawn += 1
        oldest = min(min((*self._open, group)) // self._size, self._next_batch - 1)
        for done in [number for number in self._prompts if number < oldest]:
            del self._prompts[done]
        # With a lag, a batch begins before the step that learns from it is known.
        purpose = batch_purpose(batch) if self._lag else self._purpose
        seed = seed_of(self._config.run.seed, purpose, place)
        self._open[group] = []
        for number in range(self._sampling.samples_per_prompt):
            prompt = self._prompts[batch][place]
            name = f"{group}.{number}"
            self._waiting.append(Request(name, prompt, seed_of(seed, number), self._sampling.max_tokens))

    def _next_group(self) -> int:
        """Return the next group of this replica, without the groups that exist already."""
        while self._held is None or self._held in self._finished or self._held < self._first:
            item = self._queue.draw()
            assert item is not None, "the queue of groups has no end"
            # A fixed rule gives a group to the same replica after a resume; a counter begins again.
            self._held = item if self._config.rollout.deterministic else self._first + item
        return self._held
