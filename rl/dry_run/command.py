"""Estimate whether a run fits the memory of its GPUs, and how long a step takes.

    train_rl.py --config FILE --dry-run [--world-size N] [key=value ...]

The command builds no model and needs no GPU. It validates the config and the layouts, then prints parameters
per rank and pipeline stage, memory by kind in training, refit and generation, tokens, refit traffic and
estimated seconds. Exit code 0: the run fits. Exit code 2: it does not fit, or the config is invalid.
"""

import argparse
import os
import sys
from pathlib import Path

from rl.config.checks import check
from rl.config.command_line import add_config, make_parser
from rl.config.named_paths import absent_paths
from rl.config.needs import learns_from_samples
from rl.config.schema import FIRST_KEYS, Config, load_config
from rl.dry_run import hardware
from rl.dry_run.changes import cheapest_change
from rl.dry_run.estimate import estimate
from rl.dry_run.report import report, report_forms, verdict


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        for warning in check(config):
            print(f"warning: {warning}", file=sys.stderr)
        absent = absent_paths(config)
        found = estimate(
            config,
            arguments.world_size,
            hardware.from_options(arguments),
            shape=arguments.model_shape,
            prompt=arguments.mean_prompt_tokens,
            response=arguments.mean_response_tokens,
            sigma=arguments.sigma_response_tokens,
            points=arguments.points,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(found), flush=True)
    has_forms = learns_from_samples(config) and found.points == 1 and found.hardware.has_speeds
    if not found.problems and has_forms:
        print("\n" + report_forms(found, arguments), flush=True)
    print("\n" + verdict(found, cheapest_change(found) if found.problems else None), *absent, sep="\n")
    return 2 if found.problems else 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments of a dry run. A usage error exits with code 2."""
    parser = make_parser(__doc__, prog=f"{Path(sys.argv[0]).name} --dry-run")
    add = parser.add_argument
    add_config(parser, Config, first=FIRST_KEYS)
    add("--dry-run", action="store_true", help="(this)")
    ranks = os.environ.get("SLURM_NTASKS") or os.environ.get("WORLD_SIZE") or "1"
    ranks_help = f"number of ranks, one GPU each ({ranks})"
    add("--world-size", metavar="N", type=int, default=ranks, help=ranks_help)
    shape_help = "config.json to use instead of model.path's (configs/models has some)"
    add("--model-shape", metavar="FILE", default="", help=shape_help)
    points_help = (
        "number of adapters that learn together on one base, as in a sweep in one job (sweep.adapters)"
    )
    add("--points", metavar="N", type=int, default=1, help=points_help)
    for side in ("prompt", "response"):
        mean_help = f"mean tokens of a {side} (half of the longest)"
        add(f"--mean-{side}-tokens", metavar="X", type=float, default=0.0, help=mean_help)
    sigma_help = "standard deviation of the logarithm of a response's tokens (0.7)"
    add("--sigma-response-tokens", metavar="X", type=float, default=0.7, help=sigma_help)
    for part, keys in (("generation", "timing_s/gen"), ("rest", "timing_s/step less timing_s/gen")):
        measured_help = f"measured seconds of a synchronous step: {keys} (estimated)"
        add(f"--{part}-seconds", metavar="X", type=float, default=0.0, help=measured_help)
    hardware.add_options(parser)
    arguments = parser.parse_run(argv)
    if arguments.world_size < 1:
        parser.error(f"--world-size is {arguments.world_size}, but must be at least 1")
    if arguments.points < 1:
        parser.error(f"--points is {arguments.points}, but must be at least 1")
    return arguments
