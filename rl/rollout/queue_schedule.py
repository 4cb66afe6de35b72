"""The schedule of a queue: each replica generates the groups that it draws, until none is left."""

from collections.abc import Iterator, Sequence

from rl.data.prompts import Prompt
from rl.rollout.events import Done, Event
from rl.rollout.samples import Sample
from rl.rollout.sampling import Sampling
from rl.rollout.source import SampleSource, StartedSample


class QueueSchedule:
    """Generates the samples of the prompts that a queue gives (a `Schedule`).

    Args:
        seeds: one per prompt (`StartedSample.seed`).
        queue: gives the indices of prompts.
        adapters: index of the adapter that generates for each prompt; None: the first one for all.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        queue: Iterator[int],
        adapters: Sequence[int] | None = None,
    ):
        self._prompts, self._seeds, self._queue = prompts, seeds, queue
        self._adapters = adapters or [0] * len(prompts)
        self.together = sampling.samples_per_prompt
        self.samples: list[Sample] = []
        """The samples that have ended."""

    def next_samples(self) -> list[StartedSample]:
        item = next(self._queue, None)
        return [] if item is None else self._samples_of(item)

    def _samples_of(self, item: int) -> list[StartedSample]:
        prompt, seed, adapter = self._prompts[item], self._seeds[item], self._adapters[item]
        return [StartedSample(item, number, prompt, seed, adapter) for number in range(self.together)]

    def next_events(self, step: int, source: SampleSource) -> list[Event]:
        events = source.fill()
        return events if events or source.num_open else [Done()]

    def ended(self, start: StartedSample, rows: list[Sample]) -> None:
        self.samples += rows or [Sample(start.group, start.number, (), "failed")]
