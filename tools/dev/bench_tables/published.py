"""Seconds of a step that the dry run predicts, beside seconds that other programs published.

One set of constants (`rl.dry_run.hardware`) serves all rows; of the H20 only the data sheet differs. The rows
describe the other programs' runs as far as they published them. The constants were chosen with RUNS in view;
HELD_OUT, of an older version and of GB200, was compared once, after that.

- NeMo-RL 0.6 on H100 (docs/about/performance-summary.md at 7ea279ab, and the recipes that it names). Old and
  reference log-probs are separate passes. Sequences are cut off at the longest; their mean is published, not
  the prompts' mean. Weights move one by one: gathered on every GPU, or broadcast to the generating ones.
- verl on H20 (docs/perf/dpsk.md, examples/grpo_trainer/run_deepseek_v3_671b_vllm_megatron.sh): 768 samples of
  1,960 tokens on average, three updates, the optimizer in host memory, the engine without CUDA graphs.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rl.config.objective import Objective
from rl.config.roles import Roles
from rl.config.schema import Config, Data, Model, Optimizer, Rollout, Training
from rl.dry_run.estimate import Estimate, estimate
from rl.dry_run.generation import engines_of, generation_seconds, work_of
from rl.dry_run.hardware import Hardware
from rl.dry_run.timing import training_pass
from tools.dev.bench_tables.report import TableLine

H20 = dict(gpu_memory_gib=96.0, tflops=148.0, hbm_gb_s=4000.0)
GB200 = dict(
    gpu_memory_gib=186.0, tflops=2500.0, hbm_gb_s=8000.0, nvlink_gb_s=900.0, pcie_gb_s=200.0, ranks_per_node=4
)
PROMPT = 150
"""Assumed mean tokens of a prompt of OpenMathInstruct-2 with NeMo-RL's template."""
TOLERANCE = 0.25
"""Relative error within which a prediction counts as right."""


@dataclass(frozen=True)
class Published:
    """A published run."""

    name: str
    model: str
    gpus: int
    step_s: float
    """Published seconds of a step."""
    longest: int
    """Maximum tokens of a sequence."""
    mean: float
    """Mean tokens of a sequence."""
    layout: dict
    """Keys of the section training."""
    rollout_tp: int
    prompts: int
    samples: int
    updates: int = 1
    train: int = 0
    """Ranks that train, if others generate; else 0."""
    lag: int = 0
    memory_share: float = 0.6
    machine: dict | None = None
    prompt: float = PROMPT
    longest_prompt: int = 512
    eager: bool = False

    def config(self) -> Config:
        roles = Roles(
            train=f"0-{self.train - 1}",
            rollout=f"{self.train}-{self.gpus - 1}",
            lag=self.lag,
            granularity="group" if self.lag > 1 else "batch",
        )
        return Config(
            model=Model(path=self.model, dtype="bfloat16"),
            data=Data(prompts_per_step=self.prompts, max_prompt_tokens=self.longest_prompt),
            rollout=Rollout(
                tp=self.rollout_tp,
                samples_per_prompt=self.samples,
                max_response_tokens=self.longest - self.longest_prompt,
                max_concurrent_samples=256,
                gpu_memory_utilization=self.memory_share,
                enforce_eager=self.eager,
            ),
            training=Training(
                **{"micro_batch_tokens": self.longest // self.layout.get("cp", 1)} | self.layout,
                prompts_per_minibatch=self.prompts // self.updates,
                offload="all",
            ),
            objective=Objective(kl_coef=0.01),
            roles=roles if self.train else Roles(),
        )


V3 = partial(
    Published,
    model="deepseek-v3",
    longest=1536,
    prompts=32,
    samples=16,
    rollout_tp=32,
    layout=dict(pp=16, ep=16, recompute="full"),
)
Q235 = partial(
    Published,
    model="qwen3-235b-a22b",
    longest=8192,
    prompts=16,
    samples=32,
    rollout_tp=16,
    layout=dict(tp=2, cp=2, pp=8, ep=16, recompute="full"),
)
Q30 = partial(Published, model="qwen3-30b-a3b", longest=4096, prompts=64, samples=32, updates=4, rollout_tp=2)
RUNS = [
    V3("NeMo-RL, DeepSeek-V3, 256", gpus=256, step_s=134, mean=701),
    V3("NeMo-RL, DeepSeek-V3, 512", gpus=512, step_s=111, mean=697),
    V3(
        "NeMo-RL, DeepSeek-V3, 512, 1 off",
        gpus=512,
        step_s=64.1,
        mean=710,
        train=256,
        lag=1,
        memory_share=0.8,
    ),
    Q235("NeMo-RL, Qwen3-235B, 128", gpus=128, step_s=395, mean=5698),
    Q235("NeMo-RL, Qwen3-235B, 256", gpus=256, step_s=312, mean=5713),
    Q235(
        "NeMo-RL, Qwen3-235B, 256, 1 off",
        gpus=256,
        step_s=231,
        mean=5721,
        train=128,
        lag=1,
        memory_share=0.8,
        rollout_tp=8,
        layout=dict(tp=4, pp=8, ep=16, recompute="full"),
    ),
    Q30("NeMo-RL, Qwen3-30B-A3B, 32", gpus=32, step_s=192, mean=3203, layout=dict(ep=8)),
    Q30(
        "NeMo-RL, Qwen3-30B-A3B, 32, 1 off",
        gpus=32,
        step_s=152,
        mean=3201,
        train=16,
        lag=1,
        memory_share=0.8,
        layout=dict(ep=8, pp=2),
    ),
    Q30(
        "NeMo-RL, Qwen3-30B-A3B, 192, 8 off",
        gpus=192,
        step_s=34.5,
        mean=3206,
        train=128,
        lag=8,
        memory_share=0.8,
        layout=dict(ep=8),
    ),
    Published(
        "verl, DeepSeek-V3, 96 H20",
        "deepseek-v3",
        gpus=96,
        step_s=1700,
        longest=10240,
        mean=1960 + 200,
        prompt=200,
        longest_prompt=2048,
        layout=dict(
            tp=8, pp=12, ep=8, recompute="full", optimizer=Optimizer(moments="bfloat16", host_share=1.0)
        ),
        rollout_tp=32,
        prompts=96,
        samples=8,
        updates=3,
        machine=H20,
        eager=True,
    ),
]


V3_GB200 = partial(V3, layout=dict(pp=8, ep=16, recompute="full"), machine=GB200)
Q235_GB200 = partial(
    Q235, rollout_tp=8, layout=dict(tp=2, cp=2, pp=4, ep=16, recompute="full"), machine=GB200
)
Q30_GB200 = partial(Q30, rollout_tp=1, machine=GB200)
L8 = partial(
    Published,
    model="llama-3.1-8b",
    longest=4096,
    prompts=64,
    samples=32,
    updates=4,
    rollout_tp=1,
    layout=dict(pp=2, recompute="full"),
)
Q32 = partial(
    Published,
    model="qwen3-32b",
    longest=4096,
    prompts=64,
    samples=32,
    updates=4,
    rollout_tp=4,
    layout=dict(tp=4, pp=4),
)

Q235_OFF = partial(
    Q235_GB200, layout=dict(tp=4, pp=4, ep=16, recompute="full"), train=64, lag=1, memory_share=0.8
)
HELD_OUT = [
    L8("0.4, Llama-3.1-8B, 16 H100", gpus=16, step_s=97.7, mean=1060),
    L8("0.4, Llama-3.1-8B, 16, 1 off", gpus=16, step_s=74.6, mean=1129, train=8, lag=1, memory_share=0.8),
    Q32("0.4, Qwen3-32B, 32 H100", gpus=32, step_s=393, mean=3206),
    Q32("0.4, Qwen3-32B, 64, 1 off", gpus=64, step_s=215, mean=3207, train=32, lag=1, memory_share=0.8),
    V3_GB200("DeepSeek-V3, 128 GB200", gpus=128, step_s=108, mean=711),
    V3_GB200("DeepSeek-V3, 256 GB200", gpus=256, step_s=98.7, mean=700),
    V3_GB200(
        "DeepSeek-V3, 256 GB200, 1 off",
        gpus=256,
        step_s=61.7,
        mean=708,
        rollout_tp=16,
        train=128,
        lag=1,
        memory_share=0.8,
    ),
    Q235_GB200("Qwen3-235B, 64 GB200", gpus=64, step_s=286, mean=5709),
    Q235_GB200("Qwen3-235B, 128 GB200", gpus=128, step_s=345, mean=5693),
    Q235_OFF("Qwen3-235B, 128 GB200, 1 off", gpus=128, step_s=278, mean=5705),
    Q30_GB200("Qwen3-30B-A3B, 16 GB200", gpus=16, step_s=221, mean=3199, layout=dict(ep=16)),
    Q30_GB200(
        "Qwen3-30B-A3B, 16 GB200, 1 off",
        gpus=16,
        step_s=301,
        mean=3197,
        layout=dict(ep=8),
        train=8,
        lag=1,
        memory_share=0.8,
    ),
]


def add_arguments(add: Callable[..., Any]) -> None:
    add("--sigma", type=float, default=0.7, help="standard deviation of the logarithm of lengths (0.7)")


def measure(args: Namespace, runs: Path) -> list[TableLine]:
    """Return a row per published run, with predicted and published seconds."""
    return [row_of(run, args.sigma) for run in (*RUNS, *HELD_OUT)]


def row_of(run: Published, sigma: float = 0.7) -> TableLine:
    """Return the row of a published run."""
    phases = seconds_of(run, sigma)
    total = phases.pop("step")
    columns: dict[str, float | int | str] = {**phases, "predicted, s": total, "published, s": run.step_s}
    return TableLine(run.name, columns, total / run.step_s)


def seconds_of(run: Published, sigma: float) -> dict[str, float]:
    """Return the predicted seconds of each phase, and of the step."""
    config, hardware = run.config(), Hardware(**run.machine or {})
    found = estimate(
        config, run.gpus, hardware, prompt=run.prompt, response=run.mean - run.prompt, sigma=sigma, plan=False
    )
    policy, layout, lengths = found.models["policy"], found.layout, found.lengths
    log_probs = training_pass(config, layout, policy, found.sequences, lengths, 2, hardware).total
    refit = whole_model_seconds(found)
    phases = {
        "generation": found.seconds["gen"],
        "log-probs": log_probs + found.seconds["ref"],
        "update": found.seconds["update_actor"],
        "refit": refit,
        "offload": found.seconds.get("offload", 0.0),
        "idle": sum(found.idle.values()),
    }
    if run.lag > 1:  # a further group begins when one ends
        assert found.memory.engine is not None
        engines = engines_of(config, layout, found.models, found.memory.engine, lengths, hardware)
        phases["generation"] = generation_seconds(
            work_of(config, lengths), engines, started=1.0 + run.lag, staleness=run.lag
        )
    training = sum(phases[name] for name in ("log-probs", "update", "offload"))
    both = max(phases["generation"], training) if run.train else phases["generation"] + training
    return phases | {"step": both + refit}


def whole_model_seconds(found: Estimate) -> float:
    """Return the seconds until every rank has received the whole model, one tensor after another.

    On shared GPUs each receives its own copy by its own port. A broadcast to other GPUs reaches a node once,
    by all its ports.
    """
    hardware, policy = found.hardware, found.models["policy"]
    size, tensors = 2.0 * policy.parameters, sum(len(weight.hf) for weight in policy.weights)
    far = size / hardware.ranks_per_node if found.layout.is_split else size
    return hardware.link_seconds(size, far) + tensors * hardware.tensor_ms / 1e3
