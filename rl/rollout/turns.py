"""An unfinished response: the interface between the engine and the code that continues a response.

The engine asks a `Response` for a request, generates, and returns the completion to it, until there is no
further request. Responses are stored as token ids; text and messages are derived from them.
`RolloutEngine.generate` makes a `SingleTurn` for each sample; a response of several turns, with tools, is
another class with the same methods.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Request:
    """One call of the engine."""

    token_ids: list[int]
    """The context to continue."""
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Completion:
    """The tokens that the engine sampled for a request."""

    token_ids: np.ndarray
    """int32 [R], with the end-of-sequence token if there is one."""
    logprobs: np.ndarray
    """float32 [R], in the sampling distribution (after temperature, top-p, ...)."""
    truncated: bool
    """Whether the completion ended at max_tokens."""
    weights_version: int
    """Version of the policy that sampled the tokens (`TrainingEngine.version`)."""


@dataclass(frozen=True)
class Sample:
    """One finished response."""

    prompt: int
    """Index of the prompt in the call of `RolloutEngine.generate`."""
    number: int
    """Index of the sample among those of its prompt."""
    token_ids: np.ndarray
    """int32 [R]."""
    logprobs: np.ndarray
    """float32 [R], as in `Completion`; 0 where the mask is 0."""
    truncated: bool
    """Whether the response ended at the length limit."""
    mask: np.ndarray
    """int32 [R]: 1 for tokens that the policy sampled, 0 for others (tool output)."""
    weight_versions: np.ndarray
    """int32 [R]: version of the policy that sampled each token."""


class Response(Protocol):
    """A sequence of requests whose completions make up one sample."""

    prompt: int
    number: int

    def next_request(self) -> Request | None:
        """Return the next request, or None when the response is complete."""

    def receive(self, completion: Completion) -> None:
        """Take the completion of the last request."""

    def sample(self) -> Sample:
        """Return the finished sample."""


class SingleTurn:
    """A response of one turn: the completion of the prompt."""

    def __init__(self, prompt: int, number: int, request: Request):
        self.prompt, self.number = prompt, number
        self._request: Request | None = request
        self._completion: Completion | None = None

    def next_request(self) -> Request | None:
        request, self._request = self._request, None
        return request

    def receive(self, completion: Completion) -> None:
        self._completion = completion

    def sample(self) -> Sample:
        completion = self._completion
        assert completion is not None, "the response is not complete"
        num_tokens = len(completion.token_ids)
        return Sample(
            prompt=self.prompt,
            number=self.number,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            truncated=completion.truncated,
            mask=np.ones(num_tokens, np.int32),
            weight_versions=np.full(num_tokens, completion.weights_version, np.int32),
        )
