"""The section of the configuration for generation."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl.config.draft import Draft
from rl.config.ranges import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE, ONE_TO_TWO, PROBABILITY, TEMPERATURE


@dataclass
class Rollout:
    tp: Annotated[int, AT_LEAST_ONE] = 1
    """Tensor parallel size of one vLLM replica; there are world / tp replicas."""
    ep: Annotated[int, AT_LEAST_ONE] = 1
    """Expert parallel size in the engine: number of adjacent ranks that hold whole experts, each the same
    number. They are the ranks of a replica, `rollout.tp`, or with dp_attention the ranks of several replicas.
    1: every rank of a replica holds a part of every expert."""
    dp_attention: bool = False
    """With ep a multiple of tp: ep / tp replicas share one copy of the experts. Each has its own requests,
    attention and KV cache, and all take every engine step together, an idle one a dummy step."""
    quantization: Literal["none", "fp8"] = "none"
    """Type of the engine's linear layers. none: model.dtype. fp8: FP8 with a factor per block of 128 x 128
    elements (docs/fidelity.md); the trainer's weights stay in bfloat16. It sets
    rollout_correction.truncate_tokens to 2 if the section has no other key."""
    samples_per_prompt: Annotated[int, AT_LEAST_ONE] = 8
    """Responses sampled for each prompt: the size of a group."""
    temperature: Annotated[float, TEMPERATURE] = 1.0
    """Softmax temperature of sampling, and of the trainer's log-probs."""
    top_p: Annotated[float, PROBABILITY] = 1.0
    """Nucleus: keep the smallest set of tokens with this much probability. 1: all."""
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    """Keep the k most probable tokens. 0: all."""
    min_p: Annotated[float, FRACTION] = 0.0
    """Keep tokens with at least this fraction of the most probable token's probability. 0: all."""
    biased_truncation: bool = False
    """With top_p < 1, top_k > 0 or min_p > 0: compute the trainer's log-probs over the whole vocabulary,
    although tokens were sampled from a part of it. Ratios and KL are then biased. false: the engine returns
    which tokens it kept, and the trainer's distributions are renormalised over them (docs/fidelity.md)."""
    max_response_tokens: Annotated[int, AT_LEAST_ONE] = 1024
    """Maximum tokens of a response, including the end-of-sequence token."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response; they stay in its tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a response besides the tokenizer's end-of-sequence token."""
    deterministic: bool = False
    """Assign prompts to replicas by a fixed rule instead of to the first idle replica. With the same seed,
    world and layout a run is then bitwise repeatable on CPU."""
    max_concurrent_samples: Annotated[int, AT_LEAST_ONE] = 512
    """Maximum number of samples that one replica generates at a time (vLLM's max_num_seqs). The default is
    the largest batch size for which vLLM captures a CUDA graph. Prompts that a replica has started stay
    there. If `deterministic=false` should balance the replicas, set at most half of the samples that one
    replica generates in a step."""
    gpu_memory_utilization: Annotated[float, PROBABILITY] = 0.5
    """Fraction of a GPU's memory that the engine may take while it is awake. No effect on CPU."""
    cpu_kv_cache_mib: Annotated[int, AT_LEAST_ONE] = 512
    """Maximum KV cache per rank on CPU, in MiB. Only the part that is used takes memory, and it is released
    while the trainer works."""
    kv_offload_gib: Annotated[float, NOT_NEGATIVE] = 0.0
    """Host memory per rank for the KV cache of ended turns of trajectories, in GiB: the next turn reads from
    it what the engine's cache no longer holds. Emptied at each refit. 0: none."""
    enforce_eager: bool = False
    """Disable CUDA graphs and torch.compile in the engine. Always true on CPU."""
    async_scheduling: bool = True
    """Schedule each engine step before the tokens of the previous step are processed, so that the GPU does
    not wait for Python (vLLM's option of this name). A sample has the same tokens, up to rounding, but is
    seen to end one step later: with carry_over and roles another step may cut it or change its weights. On
    CPU it saves nothing; with dp_attention or a draft it is off."""
    flashinfer_all_reduce: bool = False
    """With tp > 1 on GPUs: sum the engine's outputs with FlashInfer's kernels (vLLM's default). Each job
    compiles them, so PATH must have nvcc and ninja. Hangs and crashes are reported (vLLM #45604, #48071)."""
    draft: Draft = field(default_factory=Draft)
    """A small model that proposes tokens, which the engine verifies several at a time."""
    longest_first: bool = False
    """Start the prompts in the order of their expected response lengths, the longest first. The expected
    length is the mean when the prompt was last sampled, so the first epoch keeps its order."""
    carry_over: bool = False
    """End a step when enough groups are complete. Unfinished samples continue in the next step with its
    weights (docs/asynchrony.md). It sets rollout_correction.truncate_tokens to 2 if the section has no other
    key, for their older tokens."""
    oversample: Annotated[float, ONE_TO_TWO] = 1.25
    """carry_over: number of groups with which a step starts, including carried groups, divided by the number
    of groups on which it trains."""
    max_staleness: Annotated[int, AT_LEAST_ONE] = 1
    """carry_over: maximum number of policy versions between the version that sampled a token and the version
    that learns from it."""
    on_stale: Literal["finish", "drop"] = "finish"
    """carry_over: treatment of groups with tokens that would exceed max_staleness in the next step. finish:
    the step does not end before they are complete. drop: they are dropped and counted."""
    carry_over_cache: Literal["recompute", "keep"] = "recompute"
    """carry_over: KV cache of carried samples. recompute: it is computed again with the new weights. keep: it
    stays in memory while the trainer works; only on CPU."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0
