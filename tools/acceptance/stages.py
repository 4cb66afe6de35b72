"""The stages of tools/gpu_acceptance.py, in order. This module imports neither torch nor the program."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "deepseek-v2": "DeepseekV2ForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
}
QUICK = ("qwen2", "qwen3-moe", "deepseek-v3")
"""Architectures of --quick and of a rehearsal."""
MODES = ("full", "quick", "rehearse")


@dataclass(frozen=True)
class Stage:
    """A part of the acceptance that runs in processes of its own."""

    name: str
    text: str
    """What it shows, for the page."""
    function: str
    """module:function in tools.acceptance; its arguments are a Task and `arguments`."""
    seconds: int
    """Time limit on a GPU."""
    arguments: Mapping = field(default_factory=dict)
    every_gpu: bool = False
    """Whether it runs one rank per GPU and needs at least two."""
    modes: tuple[str, ...] = MODES


def all_stages() -> list[Stage]:
    """Return every stage; some do not run in every mode."""
    names = tuple(ARCHITECTURES)
    return [
        Stage(
            "versions",
            "Versions, devices, and the names that the program uses of each library",
            "versions:run",
            60,
        ),
        Stage(
            "trainer",
            "Log-probs, gradients and the first update of Megatron against transformers",
            "parity:run",
            180,
            dict(architectures=names, dtypes=("bfloat16", "float32")),
        ),
        Stage(
            "trainer-without-te",
            "The same without Transformer Engine, if it is installed",
            "parity:run",
            150,
            dict(architectures=names, dtypes=("bfloat16",), use_te=False),
        ),
        *(
            Stage(
                f"engine-{name}",
                f"Refit, sleep and log-probs of vLLM for {ARCHITECTURES[name]}",
                "parity:run",
                120,
                dict(architectures=(name,), dtypes=("bfloat16",), rollout_tp=1),
                modes=MODES if name in QUICK else ("full",),
            )
            for name in names
        ),
        *(
            Stage(
                f"layouts-{name}-tp{tp}",
                f"Training layouts on several GPUs, refit over NCCL into engines of {tp} ranks each: {name}",
                "parity:run",
                300,
                dict(architectures=(name,), dtypes=("bfloat16",), rollout_tp=tp, layouts=True),
                every_gpu=True,
                modes=MODES if tp == 1 else ("full",),
            )
            for name in ("qwen2", "deepseek-v3")
            for tp in (1, 2)
        ),
        Stage(
            "resume",
            "A resumed run equals the run that was not interrupted",
            "runs:resume",
            180,
            modes=("full", "rehearse"),
        ),
        Stage(
            "learning", "GRPO teaches the toy model to add", "runs:learning", 240, modes=("full", "rehearse")
        ),
        Stage(
            "bare-vllm",
            "Generation by vLLM alone, for comparison",
            "speed:bare_vllm",
            180,
            modes=("full", "rehearse"),
        ),
        Stage("speed", "Speed and memory of each phase for the shape of Qwen2.5-1.5B", "speed:run", 300),
        Stage(
            "step",
            "A GRPO step of that shape through train_rl.py, by phase",
            "runs:timeline",
            240,
            modes=("full", "rehearse"),
        ),
    ]
