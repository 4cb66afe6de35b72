"""Generation that ends when enough groups are complete, and continues the others in the next step.

An unfinished sample keeps its tokens, log-probs and weight versions. It continues as a request whose context
is the prompt and the tokens so far, with the same seed. The CPU's sampler and vLLM's on CUDA draw by seed and
position, so under equal weights the sample is the one of an uninterrupted generation, up to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rl.data.batch import Batch, fingerprint
from rl.data.prompts import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.events import Abort, Done, Event
from rl.rollout.queue import Queue, own_counter, shared_counter
from rl.rollout.schedule import QueueSchedule
from rl.rollout.sampling import Sampling
from rl.rollout.source import SampleSource, Start
from rl.rollout.turns import COLUMNS, Completion, Request, Sample, Segment, columns_of


@dataclass(frozen=True)
class Group:
    """The samples of a prompt so far; those that end with "abort" are unfinished."""

    prompt: Prompt
    samples: tuple[Completion, ...]

    @classmethod
    def of(cls, prompt: Prompt, num_samples: int) -> "Group":
        """Return a group whose samples have not been started."""
        empty = Completion(**{name: np.zeros(0, dtype) for name, dtype in COLUMNS.items()}, end="abort")
        return cls(prompt, (empty,) * num_samples)

    def within(self, max_tokens: int) -> "Group":
        """Return the group whose samples have at most `max_tokens` tokens; longer ones are truncated there.

        The result equals that of a generation with this limit.
        """
        return replace(self, samples=tuple(_within(sample, max_tokens) for sample in self.samples))

    @property
    def unfinished(self) -> list[int]:
        """Numbers of the unfinished samples."""
        return [number for number, sample in enumerate(self.samples) if sample.end == "abort"]

    @property
    def oldest(self) -> float:
        """Version of the weights that sampled the oldest token; infinite without tokens."""
        versions = (sample.weight_versions for sample in self.samples)
        return min((int(own.min()) for own in versions if len(own)), default=np.inf)


def _within(sample: Completion, max_tokens: int) -> Completion:
    length = len(sample.token_ids)
    if length < max_tokens or length == max_tokens and sample.end != "abort":
        return sample
    columns = {name: getattr(sample, name)[:max_tokens] for name in COLUMNS}
    return replace(sample, **columns, end="length")


class Quota:
    """Counts complete groups, and tells when enough groups, and all that are due, are complete.

    Args:
        num_groups: number of complete groups that is enough.
        num_due: number of groups that must be complete.
        add: adds to a counter, which is 0 at first, and returns its value.
    """

    _DUE = 1 << 32

    def __init__(self, num_groups: int, num_due: int, add: Callable[[int], int]):
        self._num_groups, self._num_due, self._add = num_groups, num_due, add

    def note_complete(self, *, is_due: bool) -> None:
        self._add(1 + self._DUE * is_due)

    def is_met(self) -> bool:
        num_due, num_groups = divmod(self._add(0), self._DUE)
        return num_groups >= self._num_groups and num_due >= self._num_due


def quota_of(engine: RolloutEngine, num_groups: int, due: set[int], num_wanted: int) -> Quota:
    """Return the quota of one call: of all replicas together, or of this one if `rollout.deterministic`.

    Every rank calls it after `RolloutEngine.queue` of the same call.
    """
    if not engine.config.deterministic:
        return Quota(num_wanted, len(due), shared_counter(f"{engine.call_name}-complete"))
    own_due = due.intersection(range(engine.replica, num_groups, engine.num_replicas))
    own_share = range(engine.replica, num_wanted, engine.num_replicas)
    return Quota(len(own_share), len(own_due), own_counter())


class QuotaSchedule(QueueSchedule):
    """Generates the unfinished samples of groups until a quota is met (a `Schedule`).

    Args:
        groups: each has an unfinished sample.
        due: indices of the groups that must be completed.
        seeds: one per group (`Start.seed`).
        queue: gives the indices of groups.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        due: set[int],
        sampling: Sampling,
        seeds: list[int],
        *,
        queue: Queue,
        quota: Quota,
    ):
        super().__init__([group.prompt for group in groups], sampling, seeds, queue=queue)
        self._groups, self._due, self._quota = groups, due, quota
        self._num_left = [len(group.unfinished) for group in groups]

    def _samples_of(self, item: int) -> list[Start]:
        group = self._groups[item]
        starts = super()._samples_of(item)
        return [replace(starts[number], so_far=group.samples[number]) for number in group.unfinished]

    def next_events(self, step: int, source: SampleSource) -> list[Event]:
        if self._quota.is_met():
            return [*map(Abort, source.running), Done()]
        return super().next_events(step, source)

    def ended(self, start: Start, rows: list[Sample]) -> None:
        super().ended(start, rows)
        if any(row.is_unfinished for row in rows):
            return
        self._num_left[start.group] -= 1
        if self._num_left[start.group] == 0:
            self._quota.note_complete(is_due=start.group in self._due)


def extend(groups: Sequence[Group], parts: Batch) -> list[Group]:
    """Return the groups with the new tokens of their unfinished samples.

    parts: the exchanged `CarriedTurns.parts`: all unfinished samples of a group, in their order, or none.
    """
    rows: list[list[int]] = [[] for _ in groups]
    for row, index in enumerate(parts.groups.tolist()):
        rows[index].append(row)
    extended = []
    for group, own in zip(groups, rows):
        samples = list(group.samples)
        for number, row in zip(group.unfinished, own, strict=bool(own)):
            samples[number] = _joined(samples[number], parts, row)
        extended.append(Group(group.prompt, tuple(samples)))
    return extended


def _joined(sample: Completion, parts: Batch, row: int) -> Completion:
    """Return the sample with the tokens of a row of `parts`."""
    assert parts.rollout_logprobs is not None and parts.weight_versions is not None
    span = slice(int(parts.offsets[row]), int(parts.offsets[row + 1]))
    end = "length" if parts.truncated[row] else "stop"
    return Completion(
        np.concatenate([sample.token_ids, parts.response_ids[row]]),
        np.concatenate([sample.logprobs, parts.rollout_logprobs[span].numpy()]),
        "abort" if parts.score_details["unfinished"][row] > 0 else end,
        np.concatenate([sample.weight_versions, parts.weight_versions[span].numpy()]),
    )


def batch_of(groups: Sequence[Group]) -> Batch:
    """Return the samples of complete groups as a batch."""
    samples = [sample for group in groups for sample in group.samples]
    columns = {name: torch.from_numpy(column) for name, column in columns_of(samples).items()}
    sizes = torch.tensor([len(group.samples) for group in groups])
    return Batch(
        prompt_ids=[group.prompt.token_ids for group in groups for _ in group.samples],
        response_ids=[sample.token_ids for sample in samples],
        groups=torch.arange(len(groups)).repeat_interleave(sizes),
        truncated=torch.tensor([sample.end == "length" for sample in samples]),
        prompts=[group.prompt for group in groups],
        rollout_logprobs=columns["logprobs"],
        weight_versions=columns["weight_versions"],
    )


@dataclass(frozen=True)
class Frontier:
    """The groups that were drawn and not consumed; identical on all ranks."""

    groups: tuple[Group, ...] = ()
    num_drawn: int = 0
    """Number of prompts that the run has drawn."""

    def state_dict(self) -> dict[str, Any]:
        """Return the frontier as plain data, with an array of all tokens for each column."""
        samples = [sample for group in self.groups for sample in group.samples]
        return columns_of(samples) | {
            "num_drawn": self.num_drawn,
            "prompts": [[group.prompt.index, group.prompt.draw] for group in self.groups],
            "fingerprints": [fingerprint([group.prompt.token_ids]) for group in self.groups],
            "lengths": [[len(sample.token_ids) for sample in group.samples] for group in self.groups],
            "ends": [[sample.end for sample in group.samples] for group in self.groups],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], prompt_of: Callable[[int, int], Prompt]) -> "Frontier":
        """Return the frontier of `state_dict`. prompt_of: (index, draw) -> prompt.

        Raises ValueError if a prompt has other tokens than the one that the group's samples respond to.
        """
        prompts = [prompt_of(index, draw) for index, draw in state["prompts"]]
        known = state.get("fingerprints", [None] * len(prompts))  # absent in version 0.1
        changed = [p.index for p, own in zip(prompts, known) if own not in (None, fingerprint([p.token_ids]))]
        if changed:
            raise ValueError(f"prompts {changed} have other tokens than when they were sampled")
        groups, start = [], 0
        for prompt, lengths, ends in zip(prompts, state["lengths"], state["ends"], strict=True):
            samples = []
            for length, end in zip(lengths, ends):
                parts = {name: state[name][start : start + length] for name in COLUMNS}
                samples.append(Completion(**parts, end=end))
                start += length
            groups.append(Group(prompt, tuple(samples)))
        return cls(tuple(groups), state["num_drawn"])
