"""Number of GPUs with which full fine-tuning fits, by the optimizer's dtype and place: dry runs.

For each number of GPUs, layouts are tried with tensor, pipeline and expert parallel sizes that are powers of
2 (pp also multiples of 3, for example 12). A row names the first number with a layout that fits.
"""

import itertools
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.config.options import ConfigError
from rl.config.schema import Config, Data, Model, Optimizer, Rollout, Training
from rl.dry_run.changes import with_values
from rl.dry_run.estimate import Estimate, changed, estimate
from rl.dry_run.hardware import GIB, Hardware
from rl.dry_run.parameters import ITEMSIZE
from rl.dry_run.shape import ModelShape as ShapeModel
from tools.dev.bench_tables.report import TableLine

MODELS = ("qwen2.5-7b", "qwen2.5-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
OPTIMIZERS = {
    "float32 moments": Optimizer(),
    "bfloat16 moments": Optimizer(moments="bfloat16"),
    "bfloat16, half in host memory": Optimizer(moments="bfloat16", host_share=0.5),
    "bfloat16, all in host memory": Optimizer(moments="bfloat16", host_share=1.0),
}
GPUS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def add_arguments(add: Callable[..., Any]) -> None:
    add("--models", nargs="+", default=list(MODELS), metavar="NAME", help="directories of configs/models")
    add("--tokens", type=int, default=8192, help="longest sequence, of which 1024 are the prompt (8192)")


def measure(args: Namespace, runs: Path) -> list[TableLine]:
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
            rows.append(TableLine(f"{model}, {name}", columns, layout.num_ranks / first))
    return rows


def config_of(model: str, tokens: int, optimizer: Optimizer) -> Config:
    """Return GRPO without a reference, with whole layers recomputed and all state offloaded in generation."""
    return Config(
        model=Model(path=model, dtype="bfloat16"),
        data=Data(prompts_per_step=512, max_prompt_tokens=1024),
        rollout=Rollout(
            max_response_tokens=tokens - 1024, max_concurrent_samples=64, gpu_memory_utilization=0.85
        ),
        training=Training(micro_batch_tokens=tokens, recompute="full", offload="all", optimizer=optimizer),
    )


def fewest(config: Config, most: int | None) -> Estimate:
    """Return the estimate of the smallest number of GPUs that fits."""
    before = estimate(config, GPUS[-1], Hardware(), plan=False)
    for number in GPUS:
        if most is not None and number > most:
            break
        for layout in layouts(config, number, before.models["policy"]):
            for rollout_tp in (1, 2, 4, 8, 16, 32):
                try:
                    found = changed(before, with_values(layout, {"rollout.tp": rollout_tp}), number)
                except ConfigError:
                    continue
                if not found.problems:
                    return found
                if found.memory.peak("training")[0] > found.memory.hardware.memory:
                    break  # whatever the engine does
    raise ValueError(f"{config.model.path} fits no number of GPUs up to {most or GPUS[-1]}.")


def layouts(config: Config, number: int, model: ShapeModel) -> Iterator[Config]:
    """Yield configs with the layouts of that number of GPUs, the least split first.

    Layouts are left out if weights and gradients, 6 bytes per parameter, exceed a GPU, or with the
    optimizer's state all GPUs.
    """
    adam, available = config.training.optimizer, Hardware().memory
    state = (1 - adam.host_share) * (4 + 2 * ITEMSIZE[adam.moments])
    if (6 + state) * model.parameters > number * available:
        return
    routed = sum(part.elements for part in model.parts if part.weight.expert is not None)
    stages = [pp for pp in (1, 2, 3, 4, 6, 8, 12, 16) if number % pp == 0]
    sizes = itertools.product((1, 2, 4, 8), stages, (1, 2, 4, 8, 16, 32) if routed else (1,))
    for tp, pp, ep in sorted(sizes, key=math.prod):
        held = (model.parameters - routed) / (tp * pp) + routed / (pp * (ep if ep > 1 else tp))
        if number % (tp * pp) == 0 and 6 * held < available:
            training = replace(config.training, tp=tp, pp=pp, ep=ep)
            yield replace(config, training=training)
