"""Ends a generation when enough groups are complete, and continues the other groups in the next step.

An unfinished sample keeps its tokens, log-probs and weight versions. In the next step it continues as a
request with the same seed; the request's context is the prompt and the tokens so far. The sampler on CPU and
vLLM's sampler on CUDA draw each token by its seed and position. Therefore, if the weights have not changed,
the continued sample equals the sample of an uninterrupted generation, up to rounding. An unfinished
trajectory continues on the replica that holds its environment, if this replica has time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from rl.data.batch import fingerprint
from rl.data.prompts import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.events import Abort, Done, Event
from rl.rollout.queue import assign_all, assign_held, own_counter, shared_counter
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.sampled_group import SampledGroup
from rl.rollout.samples import COLUMNS, Sample, Segment, pack, unpack
from rl.rollout.sampling import Sampling
from rl.rollout.source import SampleSource, StartedSample


class Quota:
    """Counts complete groups, and says whether enough groups are complete, including all due groups.

    Args:
        num_groups: number of complete groups that ends the generation.
        num_due: number of due groups; the generation does not end before all of them are complete.
        add: adds to a counter, which begins at 0, and returns the sum.
    """

    _DUE = 1 << 32

    def __init__(self, num_groups: int, num_due: int, add: Callable[[int], int]):
        self._num_groups, self._num_due, self._add = num_groups, num_due, add

    def note_complete(self, *, is_due: bool) -> None:
        self._add(1 + self._DUE * is_due)

    def is_met(self) -> bool:
        num_due, num_groups = divmod(self._add(0), self._DUE)
        return num_groups >= self._num_groups and num_due >= self._num_due


def work_of(
    engine: RolloutEngine,
    groups: Sequence[SampledGroup],
    due: set[int],
    num_wanted: int,
    *,
    holds: bool,
    is_fixed: bool,
) -> tuple[Iterator[int], Quota]:
    """Return the indices of the groups that this replica continues in one call, and the quota that ends the
    call. Every rank calls this function.

    holds: whether a group may need something that one replica holds, for example an environment. Each replica
    then begins with the groups that it holds (`SampledGroup.holder`). is_fixed: whether every replica has a
    fixed share of the groups and of the quota. A fixed share depends on no clock.
    """
    holders = [group.holder // engine.tp if holds else -1 for group in groups]
    num_replicas = engine.num_replicas
    if is_fixed:
        own = assign_all(holders, num_replicas)[engine.replica]
        share = range(engine.replica, num_wanted, num_replicas)
        return iter(own), Quota(len(share), len(due.intersection(own)), own_counter())
    held, others = assign_held(holders, num_replicas)
    queue = chain(held[engine.replica], (others[place] for place in engine.queue(len(others))))
    return queue, Quota(num_wanted, len(due), shared_counter(f"{engine.call_name}-complete"))


class QuotaSchedule(QueueSchedule):
    """Generates the unfinished samples of groups until a quota is met (a `Schedule`).

    Args:
        groups: groups with at least one unfinished sample each.
        due: indices of the groups that must be completed.
        seeds: one seed per group (`StartedSample.seed`).
        queue: gives the indices of the groups that this replica continues.
        quota: ends the generation.
    """

    def __init__(
        self,
        groups: Sequence[SampledGroup],
        due: set[int],
        sampling: Sampling,
        seeds: list[int],
        *,
        queue: Iterator[int],
        quota: Quota,
    ):
        super().__init__([group.prompt for group in groups], sampling, seeds, queue=queue)
        self._groups, self._due, self._quota = groups, due, quota
        self._num_left = [len(group.unfinished) for group in groups]

    def _samples_of(self, item: int) -> list[StartedSample]:
        group, first = self._groups[item], super()._samples_of(item)[0]
        first = replace(first, next_number=group.samples[-1].number + 1)
        return [
            replace(first, number=number, so_far=tuple(s for s in group.samples if s.number == number))
            for number in group.unfinished
        ]

    def next_events(self, step: int, source: SampleSource) -> list[Event]:
        if self._quota.is_met():
            return [*map(Abort, source.running), Done()]
        return super().next_events(step, source)

    def ended(self, start: StartedSample, rows: list[Sample]) -> None:
        super().ended(start, rows)
        if any(row.is_unfinished for row in rows):
            return
        self._num_left[start.group] -= 1
        if self._num_left[start.group] == 0:
            self._quota.note_complete(is_due=start.group in self._due)


def extend(groups: Sequence[SampledGroup], continued: Sequence[Sample]) -> list[SampledGroup]:
    """Return the groups with their continued samples.

    continued: the rows that the replicas generated, after the exchange. For each group they either replace
    all of its unfinished samples, or contain none of its samples.
    """
    found: list[list[Sample]] = [[] for _ in groups]
    for row in continued:
        found[row.prompt].append(row)
    extended = []
    for group, new in zip(groups, found):
        if new:
            numbers = {row.number for row in new}
            assert len(numbers) == len(group.unfinished), "a sample was not continued with its group"
            assert len({(row.number, row.row) for row in new}) == len(new), "a sample was continued twice"
            before = {(row.number, row.row): row for row in group.samples if row.is_unfinished}
            new = [_with_held(row, before.get((row.number, row.row))) for row in new]
            ended = [sample for sample in group.samples if not sample.is_unfinished]
            assert numbers.isdisjoint(sample.number for sample in ended), "a sample has the number of another"
            rows = sorted([*ended, *new], key=lambda row: (row.number, row.row))
            group = replace(group, samples=tuple(rows), holder=new[0].rank)
        extended.append(group)
    return extended


def _with_held(row: Sample, before: Sample | None) -> Sample:
    """Return the row, with the held values that this rank has for the row's earlier segments.

    before: the same row before it was continued; None if it is new.
    """
    known = before.segments if before is not None else ()
    kept = tuple(
        replace(segment, held=old.held) if _is_same(segment, old) else segment
        for segment, old in zip(row.segments, known)
    )
    return replace(row, segments=kept + row.segments[len(kept) :])


def _is_same(segment: Segment, other: Segment) -> bool:
    """Return whether two segments have equal values in all COLUMNS.

    They differ, for example, if the trajectory was begun again.
    """
    return all(np.array_equal(getattr(segment, name), getattr(other, name)) for name in COLUMNS)


def samples_of(groups: Sequence[SampledGroup]) -> list[Sample]:
    """Return the samples of all groups. `Sample.prompt` becomes the index of the sample's group."""
    return [replace(sample, prompt=index) for index, group in enumerate(groups) for sample in group.samples]


@dataclass(frozen=True)
class Frontier:
    """Groups that the run has drawn, and neither consumed nor dropped. Identical on all ranks."""

    groups: tuple[SampledGroup, ...] = ()
    num_drawn: int = 0
    """Number of prompts that the run has drawn."""

    def state_dict(self, samples: list[Sample], *, held: bool) -> dict[str, Any]:
        """Return the frontier as plain data.

        samples: result of `samples_of` for the frontier's groups. held: whether this rank has the values of
        the samples' held columns. If it does, the result contains these values.
        """
        return {
            "num_drawn": self.num_drawn,
            "prompts": [[group.prompt.index, group.prompt.draw] for group in self.groups],
            "fingerprints": [fingerprint([group.prompt.token_ids]) for group in self.groups],
            "holders": [group.holder for group in self.groups],
            "samples": pack(samples, held=held),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], prompt_of: Callable[[int, int], Prompt]) -> "Frontier":
        """Return the frontier from a result of `state_dict`.

        prompt_of: returns the prompt with this index and this number of its draw. Raises ValueError if the
        tokens of a prompt have changed since the samples of its group were generated.
        """
        prompts = [prompt_of(index, draw) for index, draw in state["prompts"]]
        known = zip(prompts, state["fingerprints"], strict=True)
        changed = [prompt.index for prompt, own in known if own != fingerprint([prompt.token_ids])]
        if changed:
            raise ValueError(f"prompts {changed} have other tokens than when they were sampled")
        samples: list[list[Sample]] = [[] for _ in prompts]
        for sample in unpack(state["samples"]):
            samples[sample.prompt].append(sample)
        return cls(
            tuple(map(SampledGroup, prompts, map(tuple, samples), state["holders"])), state["num_drawn"]
        )
