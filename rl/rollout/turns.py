"""Requests to the engine, its completions, and the samples that consist of them.

Token ids are the truth: a sample is a list of segments of token ids. Text and messages are derived from them.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.data.held import OF_SEQUENCE

SOURCES = ("tool", "user", "environment")
"""Sources of tokens that the policy did not sample."""


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
    """Version of the weights at which a carried sample began; None: the engine's present one."""
    adapter: int = 0
    """Index of the low-rank adapter of an engine that has several."""


@dataclass(frozen=True)
class Completion:
    """The tokens that the engine sampled for a request."""

    token_ids: np.ndarray
    """int32 [R], with the end-of-sequence token if there is one."""
    logprobs: np.ndarray
    """float32 [R], in the sampling distribution (after temperature, top-p, ...)."""
    end: str
    """Why it ended: "stop" (a stop token or string), "length" (max_tokens), or "abort"."""
    weight_versions: np.ndarray
    """int32 [R]: version of the policy that sampled each token (`TrainingEngine.version`)."""
    held: dict[str, np.ndarray] = field(default_factory=dict)
    """Values of held columns (`rl.data.held`) by name: first those of the first token, and so on. Columns in
    OF_SEQUENCE have C + R - 1 values, for a context of C tokens."""
    context_digest: int = -1
    """Hash of the tokens that the engine was given (`context_digest`); -1 if unknown."""


def context_digest(token_ids: Sequence[int] | np.ndarray) -> int:
    """Return a 32-bit hash of the tokens of a context."""
    return zlib.crc32(np.ascontiguousarray(token_ids, np.int32))


@dataclass(frozen=True)
class Segment:
    """Adjacent tokens of a response from one source."""

    token_ids: np.ndarray
    """int32 [S]."""
    logprobs: np.ndarray
    """float32 [S], as in `Completion`; 0 for tokens that the policy did not sample."""
    weight_versions: np.ndarray
    """int32 [S], as in `Completion`; for other tokens the version at which they were given."""
    is_sampled: bool = True
    """Whether the policy sampled the tokens; else they were given to it, such as the output of a tool."""
    turn: int = 0
    source: str = "policy"
    """Who gave the tokens: "policy", or one of SOURCES."""
    reward: float = 0.0
    """Reward of the turn, by an environment that rewards single turns."""
    held: dict[str, np.ndarray] = field(default_factory=dict)
    """As in `Completion`."""

    @classmethod
    def of(cls, completion: Completion, turn: int = 0) -> "Segment":
        """Return the tokens of a completion as a segment."""
        columns = completion.token_ids, completion.logprobs, completion.weight_versions
        return cls(*columns, turn=turn, held=completion.held)

    @classmethod
    def given(cls, token_ids: np.ndarray, *, version: int, turn: int, source: str) -> "Segment":
        """Return tokens that the policy did not sample as a segment."""
        zeros = np.zeros(len(token_ids), np.float32)
        versions = np.full(len(token_ids), version, np.int32)
        return cls(token_ids, zeros, versions, is_sampled=False, turn=turn, source=source)


@dataclass(frozen=True)
class Sample:
    """One finished response, or one row of it: a trajectory whose context was rewritten has several rows."""

    prompt: int
    """Index of the prompt in the call that generated the sample."""
    number: int
    """Index of the sample among those of its prompt."""
    segments: tuple[Segment, ...]
    truncated: bool
    """Whether the response ended at the length limit."""
    row: int = 0
    """Index of the row among those of the response."""
    prompt_ids: np.ndarray | None = None
    """int32 [P]: context before the first segment, if it is not that of the prompt."""
    context_digest: int = -1
    """Hash of the context by the engine's account, which the exchange compares; -1 if unknown."""
    outcome: dict[str, float] | None = None
    """Numbers that an environment reports, such as `score`; None if the reward function gives them."""
    conversation: list[dict] | None = None
    """Messages of the trajectory; None for a response of one turn."""

    def _column(self, name: str, dtype) -> np.ndarray:
        parts = [getattr(segment, name) for segment in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [R]."""
        return self._column("token_ids", np.int32)

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [R], as in `Segment`."""
        return self._column("logprobs", np.float32)

    @property
    def weight_versions(self) -> np.ndarray:
        """int32 [R], as in `Segment`."""
        return self._column("weight_versions", np.int32)

    @property
    def turns(self) -> np.ndarray:
        """int32 [R]: number of the turn, from 1, for tokens that the policy sampled; else minus the index of
        their source in SOURCES."""
        numbers = [s.turn + 1 if s.is_sampled else -SOURCES.index(s.source) for s in self.segments]
        parts = [np.full(len(s.token_ids), number, np.int32) for s, number in zip(self.segments, numbers)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def held(self, name: str) -> np.ndarray:
        """Return the values of a held column, those of all segments end to end.

        A later segment of a column in OF_SEQUENCE repeats the tokens before it; the first value counts.
        """
        parts, covered = [], 0
        for segment in self.segments:
            if name in segment.held:
                parts.append(segment.held[name][covered:])
                covered = len(segment.held[name]) if name in OF_SEQUENCE else 0
        return np.concatenate(parts)

    @property
    def mask(self) -> np.ndarray:
        """int32 [R]: 1 for tokens that the policy sampled, 0 for others."""
        return (self.turns > 0).astype(np.int32)

    @property
    def rewards(self) -> np.ndarray:
        """float32 [R]: reward of each turn on its last token, 0 elsewhere."""
        rewards = np.zeros(len(self.token_ids), np.float32)
        ends = np.cumsum([len(segment.token_ids) for segment in self.segments])
        for segment, end in zip(self.segments, ends):
            rewards[end - 1] += segment.reward
        return rewards


COLUMNS = {"token_ids": np.int32, "logprobs": np.float32, "weight_versions": np.int32}
"""Columns of sampled tokens, and their types."""


def columns_of(samples: Sequence[Completion | Sample]) -> dict[str, np.ndarray]:
    """Return the tokens of all samples, one sample after the other, as an array for each column."""
    return {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(sample, name) for sample in samples)])
        for name, dtype in COLUMNS.items()
    }
