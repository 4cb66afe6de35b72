"""The stages of tools/gpu_acceptance.py, in order. This module imports neither torch nor the program."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.acceptance.features import FEATURES, FeatureRun

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "deepseek-v2": "DeepseekV2ForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "glm4-moe": "Glm4MoeForCausalLM",
    "glm4-moe-lite": "Glm4MoeLiteForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite4": "GraniteMoeHybridForCausalLM",
    "seed-oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi4": "Phi3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
    "qwen3.5": "Qwen3_5ForCausalLM",
    "qwen3.5-moe": "Qwen3_5MoeForCausalLM",
}
FEW = ("qwen2", "qwen3-moe", "deepseek-v3")
"""Architectures that --quick and --rehearse cover."""


@dataclass(frozen=True)
class Stage:
    """A part of the acceptance that runs in its own processes."""

    name: str
    text: str
    """Description on the page."""
    function: str
    """module:function in tools.acceptance; its arguments are a Task and `arguments`."""
    seconds: int
    """Time limit on a GPU, in seconds. First imports from a cluster's file system take a minute or more."""
    arguments: Mapping = field(default_factory=dict)
    quick: bool = False
    """Whether it runs with --quick."""
    rehearsed: bool = True
    """Whether it runs with --rehearse."""
    every_gpu: bool = False
    """Whether it runs one rank per GPU and needs at least two."""
    ranks: int = 1
    """Ranks, and GPUs, of the program that the stage starts; a rehearsal has at most two."""

    @property
    def generates(self) -> bool:
        """Whether vLLM generates in it."""
        parity = self.function == "parity:run"
        return self.arguments.get("rollout_tp", 0) > 0 if parity else self.function != "versions:run"

    def runs_in(self, mode: str) -> bool:
        """Return whether the stage runs in a mode: full, quick or rehearse."""
        return {"full": True, "quick": self.quick, "rehearse": self.rehearsed}[mode]


def all_stages() -> list[Stage]:
    """Return every stage, in order."""
    trainer: dict[str, Any] = dict(architectures=tuple(ARCHITECTURES), dtypes=("bfloat16", "float32"))
    return [
        Stage("versions", "Versions and devices", "versions:run", 180, quick=True),
        _parity(
            "trainer",
            "Log-probs, gradients, first update: Megatron and transformers",
            480,
            **trainer,
            quick=True,
        ),
        _parity("trainer-without-te", "The same without Transformer Engine", 480, **trainer, use_te=False),
        *map(_engine, ARCHITECTURES),
        *(_layouts(name, tp) for name in ("qwen2", "deepseek-v3") for tp in (1, 2)),
        *(_feature(name, feature) for name, feature in FEATURES.items()),
        Stage("resume", "A resumed run equals the run that was not interrupted", "runs:resume", 300),
        _on_eight("resume-8", "The same with two tensor and four data parallel ranks", "runs:resume"),
        Stage("learning", "GRPO teaches the toy model to add", "runs:learning", 480),
        *(
            _on_eight(
                f"step-8-tp{tp}",
                f"A GRPO step of the shape of Qwen2.5-7B on 8 GPUs, engines of {tp} ranks, with its forecast",
                "runs:timeline",
                engine_ranks=tp,
            )
            for tp in (1, 2)
        ),
        Stage("bare-vllm", "Generation with vLLM alone and its defaults", "speed:bare_vllm", 300),
        Stage(
            "bare-vllm-in-process",
            "Generation with vLLM alone, as a rank calls it: in its process, with a seed per sample",
            "speed:bare_vllm",
            300,
            dict(in_process=True),
        ),
        Stage("speed", "Speed and memory of each phase, shape of Qwen2.5-1.5B", "speed:run", 420, quick=True),
        Stage("step", "A GRPO step of that shape through train_rl.py, by phase", "runs:timeline", 240),
    ]


def _feature(name: str, feature: FeatureRun) -> Stage:
    seconds = 300 if feature.ranks <= 2 else 480
    arguments = dict(name=name)
    return Stage(
        name, feature.text, "runs:feature", seconds, arguments, quick=feature.quick, ranks=feature.ranks
    )


def _on_eight(name: str, text: str, function: str, **arguments: Any) -> Stage:
    return Stage(name, text, function, 540, dict(ranks=8, **arguments), ranks=8)


def _parity(
    name: str,
    text: str,
    seconds: int,
    *,
    quick: bool = False,
    rehearsed: bool = True,
    every_gpu: bool = False,
    **arguments: Any,
) -> Stage:
    return Stage(name, text, "parity:run", seconds, arguments, quick, rehearsed, every_gpu)


def _engine(name: str) -> Stage:
    return _parity(
        f"engine-{name}",
        f"Refit, sleep and log-probs of vLLM, {ARCHITECTURES[name]}",
        240,
        architectures=(name,),
        dtypes=("bfloat16",),
        rollout_tp=1,
        quick=name == "deepseek-v3",  # qwen2 is in stage speed
        rehearsed=name in FEW,
    )


def _layouts(name: str, rollout_tp: int) -> Stage:
    return _parity(
        f"layouts-{name}-tp{rollout_tp}",
        f"Training layouts and NCCL refits into engines of {rollout_tp} ranks, {ARCHITECTURES[name]}",
        540,  # a cold start compiles for several layouts
        architectures=(name,),
        dtypes=("bfloat16",),
        rollout_tp=rollout_tp,
        layouts=True,
        quick=name == "qwen2" and rollout_tp == 1,
        rehearsed=rollout_tp == 1,
        every_gpu=True,
    )
