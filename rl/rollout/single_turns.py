"""The source of responses of one turn: each sample is the completion of its prompt."""

import numpy as np

from rl.rollout.events import Add, Done, Event
from rl.rollout.queue import Queue
from rl.rollout.samples import Completion, Request, Sample, Segment
from rl.rollout.sampling import Sampling, seed_of


class SingleTurns:
    """Draws prompts from a queue and generates their samples (a `Source`).

    Args:
        prompts: token ids of each prompt, int32 [P_i].
        seeds: one per prompt. Sample j of prompt i is sampled with `seed_of(seeds[i], j)`, so it does not
            depend on the replica that draws the prompt.
        queue: gives the indices of prompts.
        capacity: maximum number of concurrent requests.
        progress: its `update` is called with the number of samples that finished.
        adapters: index of the adapter that generates for each prompt; None: the first one for all.
    """

    def __init__(
        self,
        prompts: list[np.ndarray],
        sampling: Sampling,
        seeds: list[int],
        *,
        queue: Queue,
        capacity: int,
        progress=None,
        adapters: list[int] | None = None,
    ):
        self._adapters = adapters or [0] * len(prompts)
        self._prompts, self._sampling, self._seeds = prompts, sampling, seeds
        self._queue, self._capacity, self._progress = queue, capacity, progress
        self._is_drained = False
        self.samples: list[Sample] = []
        """The finished samples."""

    def next_events(self, num_live: int, step: int) -> list[Event]:
        events: list[Event] = []
        n = self._sampling.samples_per_prompt
        while not self._is_drained and num_live + len(events) + n <= self._capacity:
            item = self._queue.draw()
            if item is None:
                self._is_drained = True
                break
            for number in range(n):
                seed = seed_of(self._seeds[item], number)
                name, limit, adapter = f"{item}.{number}", self._sampling.max_tokens, self._adapters[item]
                events.append(Add(Request(name, self._prompts[item], seed, limit, adapter=adapter)))
        return events if events or num_live else [Done()]

    def receive(self, name: str, completion: Completion) -> None:
        prompt, number = map(int, name.split("."))
        segments, digest = (Segment.of(completion),), completion.context_digest
        self.samples.append(Sample(prompt, number, segments, completion.end, context_digest=digest))
        if self._progress is not None:
            self._progress.update(1)
