"""Teachers with another tokenizer than the policy: log-probs that are compared by spans of text.

The teacher reads the text of the prompt and of the response in its own tokens. A span is a part of the
response that begins and ends where both tokenizers cut, and has no such cut inside. By the chain rule its
log-prob is the sum over a model's tokens in it. The policy learns from a span as from one action, so that
each of its tokens gets the log-ratio of the span:

    sum over the teacher's tokens of the span of log q - sum over the policy's tokens of the span of log p

If both tokenizers cut the response alike, this is log q - log p of each token. For example, the policy has
the token "12" with the log-prob -1, and the teacher has "1" and "2" with -0.5 and -0.75: the log-ratio is
-0.25. The policy's end token stands for the teacher's. Bytes that are not yet a character, and text that the
teacher's tokenizer drops, belong to a longer span. The spans add up to the log-ratio of the response.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rl.checks.few_samples import some
from rl.data.batch import Batch
from rl.data.contexts import check_context, in_context
from rl.data.prompts import Prompt
from rl.objectives.segments import expand, segment_sum

NUM_COMPARED = 4
"""Approximate number of samples whose prompts are rendered again."""
Cuts = dict[int, int]
"""Number of characters -> number of tokens whose text these characters are."""


@dataclass(eq=False)
class ReadBatch(Batch):
    """A batch in the tokens of a teacher. Samples of other teachers keep the policy's tokens."""

    spans: Tensor = field(default_factory=lambda: torch.zeros(0, 3, dtype=torch.int64))
    """Number of the policy's tokens of each span, number of the teacher's, and whether the sample is one of
    this teacher: int64 [spans, 3], sample after sample."""

    def in_policy_tokens(self, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """Return log-probs of the policy's tokens, [T]: those whose log-ratio is that of their span.

        Samples of other teachers have 0. A span of which the teacher's tokenizer drops the whole text has the
        log-ratio 0.

        logprobs: float32 [T'], of this batch's tokens. old_logprobs: float32 [T], of the policy's tokens.
        """
        own, theirs, is_taught = self.spans.unbind(1)
        ratios = segment_sum(logprobs.double(), theirs) - segment_sum(old_logprobs.double(), own)
        ratios = expand(torch.where(theirs > 0, ratios, 0.0), own)
        return torch.where(expand(is_taught, own) > 0, old_logprobs + ratios, 0.0).float()


class OtherReader:
    """Reads a batch in the tokens of one teacher.

    Args:
        policy, teacher: the tokenizers, with a fast implementation.
        end_ids: tokens of the policy that end a response.
        max_tokens: positions of the teacher. Of a longer sequence the last tokens of the prompt are kept.
    """

    def __init__(
        self,
        policy: PreTrainedTokenizerBase,
        teacher: PreTrainedTokenizerBase,
        *,
        end_ids: Collection[int],
        max_tokens: int,
    ):
        self._policy, self._teacher = policy, teacher
        self._end_ids, self._max_tokens = end_ids, max_tokens
        self._prompts: dict[tuple[int, int], np.ndarray] = {}

    def read(self, batch: Batch, samples: Collection[int]) -> ReadBatch:
        """Return the batch with these samples in the teacher's tokens.

        Raises ValueError for a response that leaves no position for its prompt.
        """
        self._prompts.clear()
        prompts, responses = list(batch.prompt_ids), list(batch.response_ids)
        rows: list[tuple[int, int, int]] = []
        for i in range(len(batch)):
            spans = [(len(responses[i]), len(responses[i]))]
            if i in samples:
                responses[i], spans = self.response(responses[i].tolist())
                prompts[i] = self._prompt(batch.prompts[int(batch.groups[i])], len(responses[i]))
            rows += [(*span, i in samples) for span in spans]
        for i in some(sorted(samples), NUM_COMPARED, batch.fingerprint):
            limit, prompt = self._max_tokens - len(responses[i]), batch.prompts[int(batch.groups[i])]
            found: dict[str, Any] = dict(feedback=None, limit=limit, sample=i)
            check_context(prompts[i], prompt, self._teacher, "{prompt}", **found)
        spans_of_batch = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        facts: dict[str, Any] = dict(groups=batch.groups, truncated=batch.truncated)
        return ReadBatch(prompts, responses, **facts, spans=spans_of_batch)

    def response(self, ids: Sequence[int]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Return a response in the teacher's tokens, int32 [R'], and its spans.

        A span is (number of the policy's tokens, number of the teacher's tokens).
        """
        ends = bool(ids) and ids[-1] in self._end_ids
        text, own = decoded(ids[: len(ids) - ends], self._policy)
        found = self._teacher(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = list(found["input_ids"]), found["offset_mapping"]
        starts = [start for start, _ in offsets[1:]] + [len(text)]
        theirs = {end: n + 1 for n, ((_, end), start) in enumerate(zip(offsets, starts)) if end <= start}
        spans = spans_of(own, theirs, (len(ids) - ends, len(tokens)))
        if ends:
            tokens, spans = [*tokens, self._teacher.eos_token_id], [*spans, (1, 1)]
        return np.array(tokens, np.int32), spans

    def _prompt(self, prompt: Prompt, response: int) -> np.ndarray:
        """Return a prompt in the teacher's tokens, before a response of so many tokens."""
        limit = self._max_tokens - response
        if limit < 1:
            raise ValueError(
                f"a response has {response} tokens of the teacher, which has {self._max_tokens} positions; "
                "lower rollout.max_response_tokens, or use a teacher with more."
            )
        key = prompt.index, limit
        if key not in self._prompts:
            self._prompts[key] = in_context(prompt, self._teacher, "{prompt}", feedback=None, limit=limit)
        return self._prompts[key]


def decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[str, Cuts]:
    """Return the text of tokens, and its cuts. Tokens at the end that are no whole character are left out."""
    stream, text = DecodeStream(skip_special_tokens=False), ""
    cuts: Cuts = {}
    for number, token in enumerate(ids, start=1):
        if (chunk := stream.step(tokenizer.backend_tokenizer, token)) is not None:
            text += chunk
            cuts[len(text)] = number
    return text, cuts


def spans_of(policy: Cuts, teacher: Cuts, sizes: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the spans between the common cuts: (policy's tokens, teacher's tokens) of each, at least 1.

    sizes: numbers of tokens of the whole response. Tokens after the last common cut belong to the last span.
    A response without text has no span, or one with tokens of one side only.
    """
    found, last = [(0, 0)], sizes
    for place in sorted(policy.keys() & teacher.keys()):
        pair = policy[place], teacher[place]
        if pair[0] > found[-1][0] and pair[1] > found[-1][1]:
            found.append(pair)
    found = [*found[:-1], last] if len(found) > 1 else [*found, last] if last != (0, 0) else found
    return [(a - c, b - d) for (c, d), (a, b) in zip(found, found[1:])]
