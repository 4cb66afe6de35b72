"""The dialogue of one turn: a sample is the completion of its prompt."""

import numpy as np

from rl.rollout.samples import Completion, Request, Sample, Segment
from rl.rollout.sampling import Sampling, seed_of
from rl.rollout.source import Dialogue, StartedSample


class SingleTurn(Dialogue):
    """Generates responses of one turn.

    capacity: maximum number of concurrent requests.
    """

    def __init__(self, sampling: Sampling, *, capacity: int):
        super().__init__()
        self._max_tokens, self._capacity = sampling.max_tokens, capacity
        self._open: dict[str, StartedSample] = {}
        self._ready: list[Request] = []

    @property
    def num_open(self) -> int:
        return len(self._open)

    def has_room(self, num_live: int, together: int) -> bool:
        return num_live + len(self._ready) + together <= self._capacity

    def start(self, start: StartedSample) -> None:
        name, seed = f"{start.group}.{start.number}", seed_of(start.seed, start.number)
        context, limit, version = start.prompt.token_ids, self._max_tokens, None
        if start.so_far and len(tokens := start.so_far[0].token_ids):  # it may have been aborted before it
            context, limit = np.concatenate([context, tokens]), limit - len(tokens)
            version = int(start.so_far[0].weight_versions[0])
        self._open[name] = start
        self._ready.append(
            Request(
                name,
                context,
                seed,
                limit,
                first_version=version,
                adapter=start.adapter,
                images=start.prompt.placed_pixels,
            )
        )

    def requests(self, num_live: int) -> list[Request]:
        ready, self._ready = self._ready, []
        return ready

    def receive(self, name: str, completion: Completion) -> None:
        start = self._open.pop(name)
        before = start.so_far[0].segments if start.so_far else ()
        segments = (Segment.of(completion, before=before),)
        sample = Sample(start.group, start.number, segments, completion.end)
        self.ended.append((start, [start.so_far[0].continued(sample) if start.so_far else sample]))
