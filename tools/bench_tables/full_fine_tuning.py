"""Number of GPUs with which full fine-tuning fits, by the optimizer's dtype and place: dry runs.

For each number of GPUs, layouts are tried in which tensor, pipeline and expert parallel sizes are powers of
2 (pp also those that 3 divides). A row names the first number with a layout that fits.
"""

import itertools
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rl.config.options import ConfigError
from rl.config.schema import Config, Data, Model, Optimizer, Rollout, Training
from rl.dry_run.estimate import Estimate, estimate
from rl.dry_run.hardware import GIB, Hardware
from rl.dry_run.shape import models_of
from tools.bench_tables.report import Row

MODELS = ("qwen2.5-7b", "qwen2.5-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
OPTIMIZERS = {
    "float32 moments": Optimizer(),
    "bfloat16 moments": Optimizer(moments="bfloat16"),
    "bfloat16, half in host memory": Optimizer(moments="bfloat16", host_share=0.5),
    "bfloat16, all in host memory": Optimizer(moments="bfloat16", host_share=1.0),
}
GPUS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def add_arguments(add) -> None:
    add("--models", nargs="+", default=list(MODELS), metavar="NAME", help="directories of configs/models")
    add("--tokens", type=int, default=8192, help="longest sequence, of which 1024 are the prompt (8192)")


def measure(args: Namespace, runs: Path) -> list[Row]:
    """Return a row per model and optimizer."""
    rows = []
    for model in args.models:
        first = None
        for name, optimizer in OPTIMIZERS.items():
            found = fewest(config_of(model, args.tokens, optimizer), most=first)
            first = first or found.layout.num_ranks
            layout, memory = found.layout, found.memory
            columns: dict[str, float | int | str] = {
                "GPUs of 80 GiB": layout.num_ranks,
                "tp x pp x ep, rollout.tp": f"{layout.tp} x {layout.pp} x {layout.ep}, {layout.rollout_tp}",
                "training, GiB of a GPU": memory.peak("training")[0] / GIB,
                "host, GiB per GPU": (memory.away + memory.optimizer_in_host) / GIB,
            }
            rows.append(Row(f"{model}, {name}", columns, layout.num_ranks / first))
    return rows


def config_of(model: str, tokens: int, optimizer: Optimizer) -> Config:
    """Return GRPO without a reference, with whole layers recomputed and all state offloaded in generation."""
    return Config(
        model=Model(path=model, dtype="bfloat16"),
        data=Data(prompts_per_step=512, max_prompt_tokens=1024),
        rollout=Rollout(max_response_tokens=tokens - 1024, max_concurrent_samples=64),
        training=Training(micro_batch_tokens=tokens, recompute=True, offload="all", optimizer=optimizer),
    )


def fewest(config: Config, most: int | None) -> Estimate:
    """Return the estimate of the smallest number of GPUs that fits."""
    models = models_of(config)[0]
    has_experts = bool(models["policy"].num_experts)
    for number in GPUS:
        if most is not None and number > most:
            break
        for layout in layouts(config, number, has_experts):
            try:
                found = estimate(layout, number, Hardware(), plan=False)
            except ConfigError:
                continue
            if not found.problems:
                return found
    raise ValueError(f"{config.model.path} fits no number of GPUs up to {most or GPUS[-1]}.")


def layouts(config: Config, number: int, has_experts: bool) -> Iterator[Config]:
    """Yield configs with the layouts of that number of GPUs, the least split first."""
    powers = [1, 2, 4, 8]
    stages = [pp for pp in (1, 2, 3, 4, 6, 8, 12, 16) if number % pp == 0]
    experts = [1, 2, 4, 8, 16, 32] if has_experts else [1]
    sizes = [size for size in itertools.product(powers, stages, experts) if number % (size[0] * size[1]) == 0]
    for tp, pp, ep in sorted(sizes, key=lambda size: size[0] * size[1] * size[2]):
        for rollout_tp in (1, 2, 4, 8, 16, 32):
            if number % rollout_tp == 0:
                training = replace(config.training, tp=tp, pp=pp, ep=ep)
                rollout = replace(config.rollout, tp=rollout_tp, gpu_memory_utilization=0.85)
                yield replace(config, training=training, rollout=rollout)
