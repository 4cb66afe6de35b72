"""What vLLM is given for a request of the engine, and what the engine notes while the request runs."""

from dataclasses import dataclass, field

import numpy as np

from rl.rollout.samples import Request
from rl.rollout.sampling import Sampling


@dataclass
class Call:
    """Arguments with which vLLM takes a request. The parts of the engine may change them."""

    prompt: dict
    sampling: dict
    """Fields of vLLM's SamplingParams."""
    version: int
    """Version of the policy that samples the first tokens."""
    options: dict = field(default_factory=dict)
    """Further arguments of LLMEngine.add_request."""


def call_of(request: Request, sampling: Sampling, version: int) -> Call:
    """Return the call of a request. version: that of the engine's weights."""
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    fields = dict(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=request.max_tokens,
        # vLLM compiles the grammar within add_request if the executor is external_launcher, so that all ranks
        # admit the request at the same step (vLLM #29996).
        structured_outputs=request.grammar and StructuredOutputsParams(structural_tag=request.grammar),
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        extra_args={"seed": request.seed},  # for HashedSampler
        logprobs=0,  # the sampled token's only
        flat_logprobs=True,
        # Stop strings are matched in text; otherwise the trainer decodes in batches.
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # each request has its own parameters
    )
    return Call({"prompt_token_ids": request.token_ids.tolist()}, fields, version)


@dataclass
class Live:
    """A request that runs."""

    internal_id: str
    """vLLM's id: the name and a random suffix."""
    spans: list[tuple[int, int]]
    """(number of the first token, version of the policy that sampled the tokens from there on)."""

    def versions(self, num_tokens: int) -> np.ndarray:
        """Return the version of each of the request's tokens, int32 [num_tokens]."""
        versions = np.zeros(num_tokens, np.int32)
        for first, version in self.spans:
            versions[first:] = version
        return versions
