"""Verification of draft tokens on the CPU, where vLLM's rejection sampler samples from another distribution.

The token at a position is a function of the policy's distribution and of one number, the hash of the
request's seed and the position (`HashedSampler`). A draft is accepted if it is this token, so samples,
sampling masks and log-probs are the same as without drafts, up to the rounding of log-probs. The draft model
samples with the same number from its own distribution. For example, with the number 0.6 each model chooses
the first token at which its cumulative probability exceeds 0.6. The more the two distributions resemble each
other, the more often both models choose the same token; with equal distributions they always do.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from rl.rollout.cpu_sampler import HashedSampler
from rl.runtime.replacement import replace_attribute

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def install(runner: "GPUModelRunner") -> None:
    """Make vLLM's model runner sample and verify drafts by the classes below."""
    sampler, drafter = DraftedSampler(runner), runner.drafter
    assert isinstance(drafter, SpecDecodeBaseProposer)
    model: Any = drafter.model
    runner.sampler, runner.rejection_sampler = sampler, Verifier(sampler)
    replace_attribute(drafter, "_greedy_sample", lambda hidden: sampler.draft(model.compute_logits(hidden)))


def propose_nothing(*, next_token_ids: Tensor, **_: Any) -> Tensor:
    """Return no draft for each request, int64 [B, 0]; replaces `propose` of vLLM's drafter."""
    return next_token_ids.new_empty((len(next_token_ids), 0), dtype=torch.int64)


class DraftedSampler(HashedSampler):
    """`HashedSampler` for requests with several rows per step: one for each draft, and the last one."""

    counts: np.ndarray | None = None
    """Rows per request in the present step, int [B]; None: one."""
    next_positions: np.ndarray | None = None
    """Number of tokens before the next draft of each request, int [B]; None: no draft is being sampled."""

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
    ) -> SamplerOutput:
        """Sample the tokens of a step as vLLM's Sampler does."""
        self.next_positions = None
        sampled = super().forward(logits, sampling_metadata, *args, **options)
        self.next_positions = super()._rows()[1] + 1
        return sampled

    def draft(self, logits: Tensor) -> Tensor:
        """Return one draft per request, int64 [B]. logits: of the draft model, [B, V]."""
        assert self.next_positions is not None, "the first token of the step is sampled before its drafts"
        masks, self.masks = self.masks, None
        metadata = self._runner.input_batch.sampling_metadata
        tokens = super().forward(logits.float(), metadata).sampled_token_ids[:, 0]
        self.next_positions, self.masks = self.next_positions + 1, masks
        return tokens.long()

    def _rows(self) -> tuple[list[str], np.ndarray]:
        names, positions = super()._rows()
        if self.next_positions is not None:
            return names, self.next_positions
        if self.counts is None:
            return names, positions
        first = np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        offsets = np.arange(len(first)) - first
        names = [name for name, count in zip(names, self.counts.tolist()) for _ in range(count)]
        return names, np.repeat(positions, self.counts) + offsets


class Verifier(RejectionSampler):
    """Accepts the drafts that equal the sampled tokens; replaces vLLM's rejection sampler."""

    sampler: DraftedSampler

    def __init__(self, sampler: DraftedSampler) -> None:
        torch.nn.Module.__init__(self)
        self.sampler = sampler

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Return the tokens of the step, int32 [B, K + 1] for K drafts, and their log-probs.

        A row ends after its first sampled token that differs from the draft. The rest of the row is
        PLACEHOLDER_TOKEN_ID.

        Args:
            metadata: the numbers of drafts, and the drafts.
            draft_probs: None; vLLM has them only for its own sampling of drafts.
            logits: [rows, V]; for each request the logits at its drafts, and after the last draft.
        """
        assert draft_probs is None
        counts = torch.tensor(metadata.num_draft_tokens) + 1
        self.sampler.counts = counts.numpy()
        every = {name: getattr(sampling_metadata, name) for name in ("temperature", "top_p", "top_k")}
        rows = {name: each.repeat_interleave(counts) for name, each in every.items() if each is not None}
        sampled = self.sampler(logits=logits, sampling_metadata=replace(sampling_metadata, **rows))
        self.sampler.counts = None
        is_row = torch.arange(metadata.max_spec_len + 1) < counts[:, None]
        tokens = torch.full(is_row.shape, PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
        tokens[is_row] = sampled.sampled_token_ids[:, 0]
        drafts = torch.full_like(tokens, PLACEHOLDER_TOKEN_ID)
        is_draft = torch.arange(metadata.max_spec_len + 1) < counts[:, None] - 1
        drafts[is_draft] = metadata.draft_token_ids.int()
        is_accepted = (tokens == drafts).int().cumprod(1)
        tokens[:, 1:][is_accepted[:, :-1] == 0] = PLACEHOLDER_TOKEN_ID
        assert self.sampler.next_positions is not None
        self.sampler.next_positions += is_accepted.sum(1).numpy()
        logprobs = sampled.logprobs_tensors
        if logprobs is not None:
            place = is_row.flatten().cumsum(0).sub(1).clamp(min=0)  # rows of padding repeat another row
            logprobs = type(logprobs)(*(each[place] for each in logprobs[:3]))
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)
