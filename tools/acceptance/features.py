"""The features of the program that each have a short run of train_rl.py. This module imports nothing heavy.

The verdict of such a run is that of the program's own checks (docs/checks.md): they compare, in every step,
weights and log-probs of engine and trainer, gradients, tokens and the ranks. `refit.check_every=1` compares
every element of the weights after every refit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

CORRECTED = "rollout_correction.truncate_tokens=2"
TASKS = "tools/acceptance/tasks.py"
DENSE, EXPERTS = "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"


@dataclass(frozen=True)
class Feature:
    """A run of a tiny random model with one feature."""

    text: str
    overrides: tuple[str, ...]
    architecture: str = DENSE
    at_most: Mapping[str, float] = field(default_factory=dict)
    """Metric -> its limit in every step."""
    above: Mapping[str, float] = field(default_factory=dict)
    """Metric -> the value that its largest in all steps must exceed, which shows that the feature was on."""
    is_older: bool = False
    """Whether older weights sample tokens, whose probabilities then differ from the trainer's."""
    ranks: int = 1
    """Ranks, and GPUs: NCCL refuses two ranks on one GPU."""
    needs: str = ""
    """Name in vLLM without which its CUDA build lacks the feature."""


def _replay(tp: int) -> Feature:
    return Feature(
        f"Routers replay the engine's experts; engines of {tp} {'ranks' if tp > 1 else 'rank'}",
        ("training.router_replay=engine", f"rollout.tp={tp}"),
        EXPERTS,
        # Share of the choices of experts that rounding changes: as tools.acceptance.parity.CHANGED_SHARE.
        at_most={"training/router_mismatch": 0.1},
        ranks=tp,
    )


FEATURES = {
    "router-replay": _replay(1),
    "router-replay-tp2": _replay(2),
    "sampling-masks": Feature(
        "The trainer renormalises over the tokens that top-p kept",
        ("rollout.top_p=0.8",),
        needs="vllm.EngineArgs.return_sampling_mask",
    ),
    "adapter-merged": Feature(
        "Adapters of the experts and the attention, merged for the engine",
        ("adapter.kind=lora", "adapter.rank=8"),
        EXPERTS,
    ),
    "adapter-in-engine": Feature(
        "Adapters beside the base weights in the engine, with CUDA graphs, which the sleep must keep valid",
        ("adapter.kind=lora", "adapter.rank=8", "adapter.in_engine=adapter", "rollout.enforce_eager=false"),
    ),
    "fp8-base": Feature(
        "Adapters on a base in FP8, dequantised layer by layer",
        ("adapter.kind=lora", "adapter.rank=8", "adapter.base=fp8"),
    ),
    "bitwise": Feature(
        "Engine and trainer compute the same bits",
        ("model.numerics=bitwise",),
        at_most={"training/rollout_probs_diff_max": 0.0},
    ),
    "roles": Feature(
        "One rank trains and one generates, with weights that are sent between engine steps",
        ("roles.train=0-0", "roles.rollout=1-1", "roles.granularity=group", CORRECTED),
        is_older=True,
        ranks=2,
    ),
    "critic": Feature("PPO with a critic", ("algorithm=ppo",), above={"critic/vf_loss": 0}),
    "teacher": Feature(
        "Distillation from a teacher with other weights",
        ("algorithm=distill", "teacher.path={teacher}", "reward.function=rl.rewards.exact:score"),
        above={"distill/divergence": 0},
    ),
    "agents": Feature(
        "Games of three turns in an environment",
        (
            f"agents.environment={TASKS}:Echo",
            "agents.max_tokens_per_turn=6",
            "agents.order=waves",
            "rollout.max_response_tokens=40",
        ),
    ),
    "carry-over": Feature(
        "Unfinished samples continue in the next step",
        (
            "rollout.carry_over=true",
            "rollout.oversample=1.5",
            "rollout.max_response_tokens=24",
            f"rollout.stop_token_ids={list(range(10, 22))}",  # so that lengths differ
            "rollout.max_concurrent_samples=8",
            CORRECTED,
        ),
        above={"carry_over/tokens": 0},
        is_older=True,
    ),
}
"""Name of a feature -> its run."""
