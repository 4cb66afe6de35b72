"""Find the fastest configurations of a run that fit on a number of GPUs.

    lockstep plan --gpus 8 configs/qwen2.5-7b_gsm8k_grpo_8gpu.yaml
    lockstep plan --gpus 512 --gpu h200 --gpu a100-40 CONFIG [CONFIG ...] [key=value ...]
    lockstep plan --gpus 8 --measured runs/mine CONFIG

Nothing is built, and no GPU is needed. Each result has the estimated seconds of a step by phase, the memory
of the fullest GPU, and the overrides to paste. With `--measured` the last three steps of a run correct the
seconds of each phase. Exit code 2: nothing fits, or the input is invalid.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.checks import check
from rl.config.command_line import add_config, make_parser
from rl.config.options import ConfigError
from rl.config.schema import FIRST_KEYS, Config, load_config
from rl.dry_run.changes import Change, cheapest_change, overrides, with_values
from rl.dry_run.estimate import Estimate, estimate
from rl.dry_run.hardware import GIB, GPUS, Hardware, kind_of
from rl.dry_run.layouts import best_layout, fastest, least_ranks
from rl.dry_run.shape import ModelShape, models_of


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    fits = False
    try:
        config = load_config(arguments.config, arguments.overrides)
        for warning in check(config):
            print(f"warning: {warning}", file=sys.stderr)
        for gpu in arguments.gpu or ["h100"]:
            hardware = Hardware(ranks_per_node=min(arguments.gpus_per_node, arguments.gpus), **GPUS[gpu])
            known = {
                "prompt": arguments.mean_prompt_tokens,
                "response": arguments.mean_response_tokens,
                "shape": arguments.model_shape,
            }
            title = f"{arguments.gpus} x {gpu}: {config.run.name}"
            models = models_of(config, shape=arguments.model_shape)
            least, gib = least_ranks(config, models[0], hardware)
            if least > arguments.gpus:
                print(
                    f"{title}: nothing fits; weights, gradients and optimizer state take {gib:,.0f} GiB, so "
                    f"use --gpus {least} or more"
                )
                continue
            layout, own = start_of(config, arguments.gpus, hardware, models, known)
            factors = factors_of(arguments.measured, hardware, known) if arguments.measured else {}
            found = fastest(own)
            print(title if found else f"{title}: {why_none(config, own, layout)}")
            for place, change in enumerate(sorted(found, key=lambda each: total(each, factors)), start=1):
                words = overrides(config, {**layout, **change.values})
                print(lines_of(place, change, words, factors))
            fits = fits or bool(found)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if fits else 2


def start_of(
    config: Config,
    gpus: int,
    hardware: Hardware,
    models: tuple[dict[str, ModelShape], list[str]],
    known: Mapping[str, Any],
) -> tuple[dict[str, object], Estimate]:
    """Return the layout with which the search starts, and its estimate; {} for the config's own layout.

    models: see `estimate`. known: further keyword arguments of it, the mean lengths and the shape of the
    model. Raises ConfigError, about the config's own layout, if no layout is valid on so many GPUs.
    """
    try:
        return {}, estimate(config, gpus, hardware, models=models, plan=False, **known)
    except ConfigError as error:
        if (best := best_layout(config, gpus, hardware, models)) is None:
            raise error
        print(f"warning: another layout is used, because the config's cannot run: {error}", file=sys.stderr)
        values = best[0]
        new = with_values(config, values)
        return values, estimate(new, gpus, hardware, models=models, plan=False, **known)


def why_none(config: Config, own: Estimate, layout: Mapping[str, object]) -> str:
    """Return why no configuration fits, and what would. own: the estimate of the first layout."""
    why = f"nothing fits; with the best layout found, {'; '.join(own.problems)}"
    if (change := cheapest_change(own)) is None:
        return f"{why}; use more GPUs"
    return f"{why}; use --gpus {change.world_size} {overrides(config, {**layout, **change.values})}".rstrip()


def lines_of(place: int, change: Change, words: str, factors: Mapping[str, float]) -> str:
    """Return seconds, memory and overrides of a result. words: the overrides, if any."""
    found = change.estimate
    phases = ("training", "generation") if found.memory.engine else ("training",)
    peak = max(found.memory.peak(phase)[0] for phase in phases) / GIB
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in corrected(found, factors).items())
    return (
        f"{place}. {total(change, factors):.1f} s per step ({seconds}); {peak:.0f} of "
        f"{found.hardware.memory_gib:g} GiB\n   {words or '(the config as it is)'}"
    )


def corrected(found: Estimate, factors: Mapping[str, float]) -> dict[str, float]:
    """Return the estimated seconds by phase, times the factor of each phase."""
    return {name: value * factors.get(name, 1.0) for name, value in found.seconds.items()}


def total(change: Change, factors: Mapping[str, float]) -> float:
    """Return the corrected seconds of a step; with roles and lag generation and the rest overlap."""
    seconds = corrected(change.estimate, factors)
    generation, rest = seconds.get("gen", 0.0), sum(seconds.values()) - seconds.get("gen", 0.0)
    overlaps = change.estimate.layout.is_split and change.estimate.config.roles.lag
    return max(generation, rest) if overlaps else generation + rest


def factors_of(run: Path, hardware: Hardware, known: Mapping[str, Any]) -> dict[str, float]:
    """Return phase -> measured / estimated seconds of the last three steps of a run.

    known: as in `start_of`; lengths that are 0 are the run's own.

    Raises ValueError if the directory is not one of a run with three steps.
    """
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        world = json.loads((run / "environment.json").read_text(encoding="utf-8"))["world_size"]
        config = load_config(str(run / "config.yaml"))
    except OSError as error:
        raise ValueError(f"--measured {run} is not the directory of a run ({error}); correct it.") from error
    steps = [step for step in map(json.loads, lines) if "timing_s/step" in step][-3:]
    if len(steps) < 3:
        raise ValueError(f"--measured {run} has {len(steps)} steps, but 3 are needed; let it run longer.")
    lengths = {
        side: known[side] or median(step.get(f"{side}_length/mean", 0.0) for step in steps)
        for side in ("prompt", "response")
    }
    found = estimate(config, world, hardware, plan=False, **{**known, **lengths})
    measured = {name: median(step.get(f"timing_s/{name}", 0.0) for step in steps) for name in found.seconds}
    return {name: measured[name] / value for name, value in found.seconds.items() if value and measured[name]}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add_config(parser, Config, first=FIRST_KEYS, required=False)
    kinds = f"kind of GPU: {', '.join(GPUS)} (h100); several are compared"
    add("--gpus", metavar="N", type=int, required=True, help="number of GPUs, one rank each")
    add("--gpu", action="append", type=kind_of, metavar="KIND", help=kinds)
    add("--gpus-per-node", metavar="N", type=int, default=8, help="GPUs of a node (8)")
    add("--model-shape", metavar="FILE", default="", help="config.json to use instead of model.path's")
    add("--measured", metavar="RUN", type=Path, help="directory of a run on these GPUs, with three steps")
    for side in ("prompt", "response"):
        add(f"--mean-{side}-tokens", metavar="X", type=float, default=0.0, help="(half of the longest)")
    arguments = parser.parse_intermixed_args(argv)
    words = arguments.overrides
    arguments.config = [*(arguments.config or ()), *(word for word in words if "=" not in word)]
    arguments.overrides = [word for word in words if "=" in word]
    if not arguments.config:
        parser.error("CONFIG, the YAML file of the run, is missing")
    for option, count in (("--gpus", arguments.gpus), ("--gpus-per-node", arguments.gpus_per_node)):
        if count < 1:
            parser.error(f"{option} is {count}, but must be at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
