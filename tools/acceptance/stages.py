"""The stages of tools/gpu_acceptance.py, in order. This module imports neither torch nor the program."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.acceptance.features import FEATURES

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
QUICK = {
    *("versions", "trainer", "engine-deepseek-v3", "speed", "roles", "collectives", "layouts-qwen2-tp1"),
    *("dp-attention-tp2", "grid-dense-8", "grid-experts-8", "resume-8"),
}
"""Stages of --quick. Stage speed has an engine of qwen2."""
ALONE = {"versions", "bare-vllm", "bare-vllm-in-process", "speed", "step", "step-8-tp1", "step-8-tp2"}
"""Stages that run beside no other, because they measure time or the whole machine."""


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
    rehearsed: bool = True
    """Whether it runs with --rehearse."""
    every_gpu: bool = False
    """Whether it runs one rank per GPU and needs at least two."""
    ranks: int = 1
    """Ranks, and GPUs, of the program that the stage starts; a rehearsal has at most two."""
    in_job: bool = False
    """Whether it submits a Slurm job. It then needs no GPU here, and runs only if it is named."""

    @property
    def generates(self) -> bool:
        """Whether vLLM generates in it."""
        return self.function.startswith(("runs", "speed", "nodes")) or "rollout_tp" in self.arguments

    def num_devices(self, mode: str, all_devices: int) -> int:
        """Return the number of devices that the stage takes of a machine with so many."""
        needed = 0 if self.in_job else min(self.ranks, 2) if mode == "rehearse" else self.ranks
        return max(needed, all_devices) if self.name in ALONE or self.every_gpu else needed

    def runs_in(self, mode: str) -> bool:
        """Return whether the stage runs in a mode: full, quick or rehearse."""
        return (
            not self.in_job and {"full": True, "quick": self.name in QUICK, "rehearse": self.rehearsed}[mode]
        )


def all_stages() -> list[Stage]:
    """Return every stage, in order. Stages of one GPU come first, so that they run side by side."""
    trainer: dict[str, Any] = dict(architectures=tuple(ARCHITECTURES), dtypes=("bfloat16", "float32"))
    parity = "Log-probs, gradients, first update: Megatron and transformers"
    of_7b = "A GRPO step of the shape of Qwen2.5-7B on 8 GPUs, with its forecast; engines of {} ranks"
    return [
        Stage("versions", "Versions and devices", "versions:run", 180),
        Stage("trainer", parity, "parity:run", 480, trainer),
        Stage("trainer-without-te", f"{parity}, no TE", "parity:run", 480, trainer | {"use_te": False}),
        *map(_engine, ARCHITECTURES),
        Stage("resume", "A resumed run equals the run that was not interrupted", "runs:resume", 300),
        Stage("learning", "GRPO teaches the toy model to add", "runs:learning", 480),
        *map(_feature, sorted(FEATURES, key=lambda name: FEATURES[name].ranks)),
        _on_eight("resume-8", "Stage resume with two tensor and four data parallel ranks", "runs:resume"),
        Stage("collectives", "Every form of a collective", "collectives:run", 180, every_gpu=True),
        *(_layouts(name, tp) for name in ("qwen2", "deepseek-v3") for tp in (1, 2)),
        *(_on_eight(f"step-8-tp{tp}", of_7b.format(tp), "runs:timeline", engine_ranks=tp) for tp in (1, 2)),
        Stage("bare-vllm", "Generation with vLLM alone and its defaults", "speed:bare_vllm", 300),
        Stage("bare-vllm-in-process", "The same as a rank", "speed:bare_vllm", 300, dict(in_process=True)),
        Stage("speed", "Speed and memory of each phase, shape of Qwen2.5-1.5B", "speed:run", 420),
        Stage("step", "A GRPO step of that shape through train_rl.py, by phase", "runs:timeline", 240),
        Stage("two-nodes", "Refits between nodes, a killed rank, a requeue", "nodes:run", 86400, in_job=True),
    ]


def _feature(name: str) -> Stage:
    ranks = FEATURES[name].ranks
    seconds = 300 if ranks <= 2 else 480
    return Stage(name, FEATURES[name].text, "runs:feature", seconds, dict(name=name), ranks=ranks)


def _on_eight(name: str, text: str, function: str, **arguments: Any) -> Stage:
    return Stage(name, text, function, 540, dict(ranks=8, **arguments), ranks=8)


def _engine(name: str) -> Stage:
    text = f"Refit, sleep and log-probs of vLLM, {ARCHITECTURES[name]}"
    arguments = dict(architectures=(name,), dtypes=("bfloat16",), rollout_tp=1)
    return Stage(f"engine-{name}", text, "parity:run", 240, arguments, rehearsed=name in FEW)


def _layouts(name: str, tp: int) -> Stage:
    text = f"Training layouts and NCCL refits into engines of {tp} ranks, {ARCHITECTURES[name]}"
    arguments = dict(architectures=(name,), dtypes=("bfloat16",), rollout_tp=tp, layouts=True)
    own = dict(rehearsed=tp == 1, every_gpu=True)
    # A cold start compiles for several layouts.
    return Stage(f"layouts-{name}-tp{tp}", text, "parity:run", 540, arguments, **own)
