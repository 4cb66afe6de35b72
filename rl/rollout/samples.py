"""Requests to the engine, its completions, and the samples made of completions.

Token ids are the truth: a sample is a list of segments of token ids. Text and messages are derived from them.
`pack` is the one serialised form of samples, in checkpoints and in messages between ranks.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl.data.held import OF_CONTEXT, OF_SEQUENCE, Absent

SOURCES = ("tool", "user", "environment")
"""Sources of tokens that the policy did not sample."""
ENDS = ("stop", "length", "abort", "failed")
"""Why a completion or a sample ended: a stop token or string, a limit of tokens, or a request to abort it.

A "failed" sample has no tokens, because its environment failed; the sample is left out of its group.
"""
COLUMNS = {"token_ids": np.int32, "logprobs": np.float32, "weight_versions": np.int32}
"""Values of a segment per token, and their types."""


@dataclass(frozen=True)
class Request:
    """One call of the engine."""

    name: str
    """Unique among the requests of one `RolloutEngine.run`."""
    token_ids: np.ndarray
    """int32 [C]: the context to continue."""
    seed: int
    max_tokens: int
    grammar: str | None = None
    """A structural tag (JSON of xgrammar) that the tokens must follow; None: any tokens."""
    first_version: int | None = None
    """Version of the weights when a carried sample began; None: the engine's present version."""
    num_begun: int = 0
    """Number of tokens at the end of the context that an aborted request sampled for the same turn."""
    adapter: int = 0
    """Index of the low-rank adapter of an engine that has several."""
    images: tuple[np.ndarray, np.ndarray] | None = None
    """`rl.data.images.placed_pixels` of the context; None: it has no images."""


@dataclass(frozen=True)
class Completion:
    """The tokens that the engine sampled for a request."""

    token_ids: np.ndarray
    """int32 [R], with the end-of-sequence token if there is one."""
    logprobs: np.ndarray
    """float32 [R], in the sampling distribution (after temperature, top-p, ...)."""
    end: str
    """One of ENDS."""
    weight_versions: np.ndarray
    """int32 [R]: version of the policy that sampled each token (`TrainingEngine.version`)."""
    held: dict[str, np.ndarray] = field(default_factory=dict)
    """Values of held columns (`rl.data.held`) by name, in the order of the tokens. Columns in OF_SEQUENCE
    have C + R - 1 values for a context of C tokens: for example, 102 for 100 tokens and 3 sampled ones."""
    context_digest: int = -1
    """Hash of the tokens that the engine was given (`context_digest`); -1 if unknown."""
    seed: int = -1
    """Seed of the engine's sampling; -1 if unknown."""
    sampling: int = -1
    """`rl.rollout.sampling.parameters_code` of the engine's parameters; -1 if unknown."""


def context_digest(token_ids: Sequence[int] | np.ndarray, before: int = 0) -> int:
    """Return a 32-bit hash of the tokens of a context. before: the hash of the tokens before them."""
    return zlib.crc32(np.ascontiguousarray(token_ids, np.int32).data, before)


def segment_digest(token_ids: np.ndarray, is_sampled: np.ndarray) -> int:
    """Return a 32-bit hash of tokens, int32 [S], and of whether the policy sampled each, bool [S]."""
    return zlib.crc32(is_sampled.astype(np.uint8).data, context_digest(token_ids))


@dataclass(frozen=True)
class Segment:
    """Adjacent tokens of a response from one source."""

    token_ids: np.ndarray
    """int32 [S]."""
    logprobs: np.ndarray
    """float32 [S], as in `Completion`; 0 for tokens that the policy did not sample."""
    weight_versions: np.ndarray
    """int32 [S], as in `Completion`; for other tokens the version when they were given."""
    turn: int = 0
    source: str = "policy"
    """Origin of the tokens: "policy", or one of SOURCES."""
    reward: float = 0.0
    """Reward of the turn, by an environment that rewards single turns."""
    held: dict[str, np.ndarray | Absent] = field(default_factory=dict)
    """Held columns (`Completion`), without the values that earlier segments already have.

    `Absent` on ranks that received the sample without these values.
    """
    digest: int = -1
    """`segment_digest` where the segment was made; -1 if unknown."""
    context_digest: int = -1
    """`context_digest` of all tokens before the segment, by the engine that sampled it; -1 if unknown."""
    holder: int = -1
    """Rank that has the values of held columns, after an exchange; -1: every rank that has the segment."""
    end: str = "stop"
    """Why the engine ended the request that sampled the tokens (`Completion.end`). After "abort" the turn
    continues in the next segment, or is unfinished."""
    seed: int = -1
    """As in `Completion`."""
    sampling: int = -1
    """As in `Completion`."""

    @classmethod
    def of(cls, completion: Completion, turn: int = 0, before: Sequence["Segment"] = ()) -> "Segment":
        """Return the tokens of a completion as a segment.

        before: the earlier segments of the row. The completion's columns in OF_CONTEXT contain values for the
        tokens of these segments again. These repeated values are dropped, because the values of the earlier
        segments come from the passes that sampled the tokens.
        """
        held: dict[str, np.ndarray | Absent] = {}
        for name, values in completion.held.items():
            known = sum(len(s.held[name]) for s in before if name in s.held) if name in OF_CONTEXT else 0
            held[name] = values[known:]
        is_sampled = np.ones(len(completion.token_ids), bool)
        return cls(
            completion.token_ids,
            completion.logprobs,
            completion.weight_versions,
            turn,
            held=held,
            digest=segment_digest(completion.token_ids, is_sampled),
            context_digest=completion.context_digest,
            end=completion.end,
            seed=completion.seed,
            sampling=completion.sampling,
        )

    @classmethod
    def given(cls, token_ids: np.ndarray, *, version: int, turn: int, source: str) -> "Segment":
        """Return tokens that the policy did not sample as a segment."""
        zeros = np.zeros(len(token_ids), np.float32)
        versions = np.full(len(token_ids), version, np.int32)
        return cls(token_ids, zeros, versions, turn=turn, source=source)._with_digest()

    @property
    def is_sampled(self) -> bool:
        """Whether the policy sampled the tokens. Other tokens were given, such as the output of a tool."""
        return self.source == "policy"

    @property
    def row_key(self) -> int:
        """`rl.data.held.row_key` of all tokens up to the last one of this segment; -1 if unknown."""
        known = self.context_digest != -1
        return context_digest(self.token_ids, self.context_digest) if known else -1

    @property
    def values(self) -> dict[str, np.ndarray]:
        """The held columns, all of whose values must be on this rank."""
        values = {name: held for name, held in self.held.items() if not isinstance(held, Absent)}
        assert len(values) == len(self.held), "another rank has the values of the segment's held columns"
        return values

    def _with_digest(self) -> "Segment":
        flags = np.full(len(self.token_ids), self.is_sampled)
        return replace(self, digest=segment_digest(self.token_ids, flags))

    def first(self, num_tokens: int) -> "Segment":
        """Return the first tokens of the segment, at least one. Its held values must be on this rank."""
        columns = {name: getattr(self, name)[:num_tokens] for name in COLUMNS}
        values = self.values
        held: dict[str, np.ndarray | Absent] = {**values}
        for name in held.keys() & OF_SEQUENCE:  # the last token has no value
            held[name] = values[name][: len(values[name]) - (len(self.token_ids) - num_tokens)]
        if "kept_counts" in held:
            counts = values["kept_counts"][:num_tokens]
            held |= {"kept_counts": counts, "kept_ids": values["kept_ids"][: int(counts.sum(dtype=np.int64))]}
        return replace(self, **columns, held=held)._with_digest()


@dataclass(frozen=True)
class Sample:
    """One response, or one row of it: for example, a rewritten context begins another row."""

    prompt: int
    """Index of the prompt in the call that generated the sample."""
    number: int
    """Index of the sample in its group."""
    segments: tuple[Segment, ...]
    end: str = "stop"
    """One of ENDS; a sample that ended with "abort" is unfinished."""
    row: int = 0
    """Index of the row in the response."""
    prompt_ids: np.ndarray | None = None
    """int32 [P]: context before the first segment, if it differs from the prompt."""
    outcome: dict[str, float] | None = None
    """Numbers that an environment reports, such as `score`; None if the reward function gives them."""
    conversation: list[dict] | None = None
    """Messages of the trajectory; None for a response of one turn."""
    rank: int = -1
    """Rank that generated the sample, after an exchange; -1 if unknown."""

    @property
    def is_unfinished(self) -> bool:
        return self.end == "abort"

    @property
    def truncated(self) -> bool:
        """Whether the response ended at the length limit."""
        return self.end == "length"

    def with_segments(self, change: Callable[[Segment], Segment]) -> "Sample":
        """Return the sample with every segment changed."""
        return replace(self, segments=tuple(map(change, self.segments)))

    def continued(self, part: "Sample") -> "Sample":
        """Return this unfinished sample with the tokens of `part` after its own."""
        return replace(part, segments=self.segments + part.segments)

    def within(self, max_tokens: int) -> "Sample":
        """Return the sample as a generation with this limit of tokens would have ended it."""
        length = len(self.token_ids)
        if length < max_tokens or length == max_tokens and not self.is_unfinished:
            return self
        segments, room = [], max_tokens
        for segment in self.segments:
            if room > 0:
                segments.append(segment if len(segment.token_ids) <= room else segment.first(room))
            room -= len(segment.token_ids)
        return replace(self, segments=tuple(segments), end="length")

    def _column(self, name: str) -> np.ndarray:
        parts = [getattr(segment, name) for segment in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, COLUMNS[name])

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [R]."""
        return self._column("token_ids")

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [R], as in `Segment`."""
        return self._column("logprobs")

    @property
    def weight_versions(self) -> np.ndarray:
        """int32 [R], as in `Segment`."""
        return self._column("weight_versions")

    @property
    def turns(self) -> np.ndarray:
        """int32 [R]: number of the turn, from 1, for tokens that the policy sampled. For other tokens, minus
        the index of their source in SOURCES."""
        numbers = [s.turn + 1 if s.is_sampled else -SOURCES.index(s.source) for s in self.segments]
        return np.array(numbers, np.int32).repeat([len(s.token_ids) for s in self.segments])

    def held(self, name: str) -> np.ndarray | None:
        """Return the values of a held column, of all segments end to end.

        None if there are none, or if other ranks have some of them.
        """
        parts = [segment.held[name] for segment in self.segments if name in segment.held]
        arrays = [values for values in parts if not isinstance(values, Absent)]
        return np.concatenate(arrays) if arrays and len(arrays) == len(parts) else None

    def held_length(self, name: str) -> int:
        """Return the number of values of a held column, also if other ranks have them."""
        return sum(len(segment.held[name]) for segment in self.segments if name in segment.held)

    @property
    def holder(self) -> int:
        """Rank with the held values of the last segment that has any; 0 if all ranks have them."""
        last = next((segment.holder for segment in reversed(self.segments) if segment.held), self.rank)
        return max(last, 0)

    @property
    def row_key(self) -> int:
        """`rl.data.held.row_key` by the engine's account; -1 if unknown."""
        key = -1
        for segment in self.segments:
            if segment.is_sampled:
                key = segment.row_key
            elif key != -1:
                key = context_digest(segment.token_ids, key)
        return key

    @property
    def rewards(self) -> np.ndarray:
        """float32 [R]: reward of each turn on its last token, 0 elsewhere."""
        rewards = np.zeros(len(self.token_ids), np.float32)
        ends = np.cumsum([len(segment.token_ids) for segment in self.segments])
        for segment, end in zip(self.segments, ends):
            rewards[end - 1] += segment.reward
        return rewards


# Serialised form --------------------------------------------------------------------------------------------


def pack(samples: Sequence[Sample], *, held: bool = True, conversations: bool = True) -> dict[str, Any]:
    """Return samples as plain data: arrays of one dimension, lists, numbers and texts.

    held: with the values of held columns, not only their sizes. conversations: with conversations.
    """
    segments = [segment for sample in samples for segment in sample.segments]
    contexts = [sample.prompt_ids for sample in samples if sample.prompt_ids is not None]
    per_sample = {
        "prompt": [sample.prompt for sample in samples],
        "number": [sample.number for sample in samples],
        "row": [sample.row for sample in samples],
        "end": [ENDS.index(sample.end) for sample in samples],
        "num_segments": [len(sample.segments) for sample in samples],
        "context_length": [-1 if s.prompt_ids is None else len(s.prompt_ids) for s in samples],
    }
    per_segment = {
        "length": [len(segment.token_ids) for segment in segments],
        "turn": [segment.turn for segment in segments],
        "source": [-1 if segment.is_sampled else SOURCES.index(segment.source) for segment in segments],
        "digest": [segment.digest for segment in segments],
        "segment_context": [segment.context_digest for segment in segments],
        "holder": [segment.holder for segment in segments],
        "segment_end": [ENDS.index(segment.end) for segment in segments],
        "seed": [segment.seed for segment in segments],
        "sampling": [segment.sampling for segment in segments],
    }
    return {
        **{name: np.array(values, np.int64) for name, values in (per_sample | per_segment).items()},
        "reward": np.array([segment.reward for segment in segments], np.float64),
        **{name: _joined((getattr(s, name) for s in segments), kind) for name, kind in COLUMNS.items()},
        "contexts": _joined(contexts, np.int32),
        "outcomes": [sample.outcome for sample in samples],
        "conversations": [sample.conversation if conversations else None for sample in samples],
        "held": {
            name: _pack_held([segment.held.get(name) for segment in segments], with_values=held)
            for name in dict.fromkeys(name for segment in segments for name in segment.held)
        },
    }


def _pack_held(values: list, *, with_values: bool) -> dict[str, Any]:
    """Return the values of a held column, one entry per segment; None for segments without them."""
    first = next(entry for entry in values if entry is not None)
    packed = {
        "lengths": np.array([-1 if entry is None else len(entry) for entry in values], np.int64),
        "dtype": first.dtype.str,
        "shape": list(first.shape[1:]),
    }
    if with_values:
        packed["values"] = _joined((entry.ravel() for entry in values if entry is not None), first.dtype)
    return packed


def unpack(packed: dict[str, Any], *, rank: int = -1) -> list[Sample]:
    """Return the samples of `pack`.

    rank: rank that generated the samples; it has the held values unless `pack` names another holder.
    """
    segments = iter(_segments(packed, rank))
    per_sample = ("prompt", "number", "row", "end", "num_segments", "context_length")
    rows = zip(*(packed[name].tolist() for name in per_sample), packed["outcomes"], packed["conversations"])
    samples, start = [], 0
    for prompt, number, row, end, count, length, outcome, conversation in rows:
        samples.append(
            Sample(
                prompt,
                number,
                tuple(next(segments) for _ in range(count)),
                ENDS[end],
                row=row,
                prompt_ids=packed["contexts"][start : start + length] if length >= 0 else None,
                outcome=outcome,
                conversation=conversation,
                rank=rank,
            )
        )
        start += max(length, 0)
    return samples


def _segments(packed: dict[str, Any], rank: int) -> list[Segment]:
    columns = zip(*(cut(packed[name], packed["length"]) for name in COLUMNS))
    known = packed | {"sampling": packed.get("sampling", np.full(len(packed["seed"]), -1))}  # an old file
    names = (
        *("turn", "source", "reward", "digest", "segment_context"),
        *("holder", "segment_end", "seed", "sampling"),
    )
    rows = (dict(zip(names, row)) for row in zip(*(known[name].tolist() for name in names)))
    segments = [
        Segment(
            token_ids,
            logprobs,
            versions,
            row["turn"],
            "policy" if row["source"] < 0 else SOURCES[row["source"]],
            row["reward"],
            digest=row["digest"],
            context_digest=row["segment_context"],
            holder=rank if row["holder"] < 0 else row["holder"],
            end=ENDS[row["segment_end"]],
            seed=row["seed"],
            sampling=row["sampling"],
        )
        for (token_ids, logprobs, versions), row in zip(columns, rows)
    ]
    for name, column in packed["held"].items():
        dtype, shape = np.dtype(column["dtype"]), tuple(column["shape"])
        parts: Sequence[np.ndarray | Absent]
        if "values" in column:
            parts = cut(column["values"].reshape(-1, *shape), column["lengths"].clip(min=0))
        else:
            parts = [Absent(dtype, (max(length, 0), *shape)) for length in column["lengths"].tolist()]
        for segment, length, part in zip(segments, column["lengths"], parts):
            if length >= 0:
                segment.held[name] = part
    return segments


def _joined(parts: Iterable[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def cut(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Return parts of these lengths, which cover the values."""
    return np.split(values, lengths.cumsum()[:-1]) if len(lengths) else []
