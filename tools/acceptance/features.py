"""The features of the program that each have a short run of train_rl.py. This module imports nothing heavy.

The program's own checks decide the verdict of such a run (docs/checks.md): they compare, in every step,
weights and log-probs of engine and trainer, gradients, tokens and the ranks. `refit.check_every=1` compares
every element of the weights after every refit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CORRECTED = "rollout_correction.truncate_tokens=2"
ROLES = f"roles.train=0-0 roles.rollout=1-1 roles.granularity=group {CORRECTED}"
LORA = "adapter.kind=lora adapter.rank=8"
TASKS = "tools/acceptance/tasks.py"
DENSE, EXPERTS = "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"
FOUR_LAYERS, IMAGES = "Gemma3ForCausalLM", "Qwen2_5_VLForConditionalGeneration"


@dataclass(frozen=True)
class FeatureRun:
    """A run of a tiny random model with one feature."""

    text: str
    overrides: str
    """Overrides of train_rl.py, with spaces between them."""
    architecture: str = DENSE
    at_most: Mapping[str, float] = field(default_factory=dict)
    """Metric -> its limit in every step, for example 0.1 for training/router_mismatch."""
    above: Mapping[str, float] = field(default_factory=dict)
    """Metric -> a value that the maximum over all steps must exceed, as a proof that the feature was on."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the tiny model's config, for example hidden_size=256."""
    differs: bool = False
    """Whether older or rounded weights sample tokens; the probabilities then differ from the trainer's."""
    ranks: int = 1
    """Ranks, and GPUs: NCCL refuses two ranks on one GPU."""
    has_images: bool = False
    """Whether prompts are the images of tools/make_image_toy.py."""
    on_two: str = ""
    """Further overrides of a rehearsal, which has at most two ranks."""


def _replay(tp: int) -> FeatureRun:
    return FeatureRun(
        f"Routers replay the engine's experts; engines of {tp} {'ranks' if tp > 1 else 'rank'}",
        f"training.router_replay=engine rollout.tp={tp}",
        EXPERTS,
        # Share of the choices of experts that rounding changes: as tools.acceptance.parity.CHANGED_SHARE.
        at_most={"training/router_mismatch": 0.1},
        ranks=tp,
    )


FEATURES = {
    "router-replay": _replay(1),
    "router-replay-tp2": _replay(2),
    "sampling-masks": FeatureRun(
        "The trainer renormalises over the tokens that top-p kept", "rollout.top_p=0.8"
    ),
    "adapter-merged": FeatureRun(
        "Adapters of the experts and the attention, merged for the engine", LORA, EXPERTS
    ),
    "adapter-dp2": FeatureRun("Adapters on two data parallel ranks", LORA, ranks=2),
    "adapter-in-engine": FeatureRun(
        "Adapters beside the base weights in the engine, with CUDA graphs, which the sleep must keep valid",
        f"{LORA} adapter.in_engine=adapter rollout.enforce_eager=false",
    ),
    "fp8-base": FeatureRun(
        "Adapters on a base in FP8, dequantised layer by layer", f"{LORA} adapter.base=fp8"
    ),
    "fp8-engine": FeatureRun(
        "Linear layers and experts of the engine in FP8, quantised at each refit",
        "model.dtype=bfloat16 rollout.quantization=fp8",
        EXPERTS,
        sizes=dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=256, num_key_value_heads=4),
        differs=True,
    ),
    "bitwise": FeatureRun(
        "Engine and trainer compute the same bits",
        "model.numerics=bitwise",
        at_most={"training/rollout_probs_diff_max": 0.0},
    ),
    "draft-model": FeatureRun(
        "A draft model proposes tokens; the program compares the distribution of its samples by chi-square",
        'rollout.draft={{"path":"{teacher}","tokens":2,"min_tokens_per_step":1}}',
        above={"perf/draft_acceptance/1": 0},
    ),
    "draft-head": FeatureRun(
        "The policy's own head proposes tokens and is refitted with it",
        'rollout.draft={{"method":"mtp","tokens":1,"min_tokens_per_step":1}} training.mtp.head_lr=0.001',
        "DeepseekV3ForCausalLM",
        above={"perf/draft_acceptance/1": 0},
        sizes=dict(num_nextn_predict_layers=1),
    ),
    "roles": FeatureRun(
        "One rank trains and one generates, with weights that are sent between engine steps",
        ROLES,
        differs=True,
        ranks=2,
    ),
    "critic": FeatureRun("PPO with a critic", "algorithm=ppo", above={"critic/vf_loss": 0}),
    "teacher": FeatureRun(
        "Distillation from a teacher with other weights",
        "algorithm=distill teacher.path={teacher} reward.function=rl.rewards.exact:score",
        above={"distill/divergence": 0},
    ),
    "agents": FeatureRun(
        "Games of three turns in an environment",
        f"agents.environment={TASKS}:Echo agents.max_tokens_per_turn=6 agents.order=waves "
        "rollout.max_response_tokens=40 rollout.kv_offload_gib=0.1",
    ),
    "images": FeatureRun(
        "A vision tower learns with the policy",
        "model.vision=train data.image_key=images data.max_prompt_tokens=32",
        IMAGES,
        has_images=True,
    ),
    "recompute": FeatureRun(
        "The backward pass computes attention and experts again",
        "training.recompute=selective training.recompute_modules=[core_attn,moe]",
        EXPERTS,
    ),
    "compact-optimizer": FeatureRun(
        "Adam's moments in bfloat16, half of the optimizer's state in host memory",
        "training.optimizer.moments=bfloat16 training.optimizer.host_share=0.5",
    ),
    "changed-only": FeatureRun(
        "A trainer sends its generator only the elements of the weights that changed",
        f"{ROLES} refit.changed_only=true",
        differs=True,
        ranks=2,
    ),
    "context-parallel": FeatureRun("Two ranks share each row of tokens", "training.cp=2", ranks=2),
    "pipeline-chunks": FeatureRun(
        "Two pipeline stages of two chunks each", "training.pp=2 training.vpp=2", FOUR_LAYERS, ranks=2
    ),
    "engine-experts": FeatureRun(
        "Whole experts on each rank of an engine of two ranks",
        "training.ep=2 rollout.tp=2 rollout.ep=2",
        EXPERTS,
        ranks=2,
    ),
    "dp-attention": FeatureRun(
        "Two engines with their own attention share the experts",
        "training.ep=2 rollout.ep=2 rollout.dp_attention=true",
        EXPERTS,
        ranks=2,
    ),
    "dp-attention-tp2": FeatureRun(
        "Two engines of two ranks with their own attention share the experts",
        "training.ep=4 rollout.tp=2 rollout.ep=4 rollout.dp_attention=true",
        EXPERTS,
        ranks=4,
        on_two="training.ep=2 rollout.tp=1 rollout.ep=2",
    ),
    "grid-dense-8": FeatureRun(
        "Tensor, pipeline and context parallel ranks, and an engine of eight ranks",
        "training.tp=2 training.pp=2 training.cp=2 rollout.tp=8",
        sizes=dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=8),
        ranks=8,
        on_two="training.pp=1 training.cp=1 rollout.tp=2",
    ),
    "grid-experts-8": FeatureRun(
        "Tensor, pipeline and expert parallel ranks, and engines of four ranks with whole experts",
        "training.tp=2 training.pp=2 training.ep=2 rollout.tp=4 rollout.ep=4",
        EXPERTS,
        sizes=dict(num_key_value_heads=4),
        ranks=8,
        on_two="training.pp=1 rollout.tp=2 rollout.ep=2",
    ),
    "carry-over": FeatureRun(
        "Unfinished samples continue in the next step",
        "rollout.carry_over=true rollout.oversample=1.5 rollout.max_response_tokens=24 "
        "rollout.stop_token_ids=[10,11,12,13,14,15,16,17,18,19,20,21] "  # so that lengths differ
        f"rollout.max_concurrent_samples=8 {CORRECTED}",
        above={"carry_over/tokens": 0},
        differs=True,
    ),
}
"""Name of a feature -> its run."""
