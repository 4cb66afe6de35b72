"""Options shared by several commands."""

import argparse
import shlex
import sys

from launch.batch_file import Resources
from launch.schedulers import SCHEDULERS

OPTIONS = {
    "nodes": ("N", "nodes"),
    "gpus_per_node": ("N", "GPUs, one rank each (8); 0: CPU nodes"),
    "ranks_per_node": ("N", "ranks of a CPU node"),
    "cpus_per_task": ("N", "cores of a rank (the site's default)"),
    "time": ("T", "time limit (1-00:00:00)"),
    "mem": ("SIZE", "memory of a node (GPU nodes: all)"),
    "account": ("NAME", "account (your site's default)"),
    "partition": ("NAME", "partition (your site's default)"),
    "qos": ("NAME", "qos (your site's default)"),
    "signal_lead_s": ("S", "seconds before the end at which the run stops and saves (600)"),
}
"""Field of `Resources` -> (placeholder, help) of its option."""


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of `Resources`."""
    group = parser.add_argument_group("resources")
    group.add_argument("--scheduler", choices=list(SCHEDULERS), default="slurm", help="(slurm)")
    for name, (placeholder, text) in OPTIONS.items():
        default = getattr(Resources(), name)
        option = "--" + name.removesuffix("_s").replace("_", "-")
        options = dict(dest=name, metavar=placeholder, type=type(default), help=text)
        group.add_argument(option, default=default, required=name == "nodes", **options)
    group.add_argument("--no-requeue", dest="requeue", action="store_false", help="never requeue the job")
    sbatch_help = "any other option of sbatch (qsub, bsub, flux batch), e.g. --sbatch=--constraint=h100"
    group.add_argument("--sbatch", metavar="OPTION", action="append", default=[], help=sbatch_help)


def resources_of(arguments: argparse.Namespace) -> Resources:
    """Return the resources of the options. Raises ConfigError for invalid ones."""
    values = {name: getattr(arguments, name) for name in (*OPTIONS, "scheduler", "requeue", "sbatch")}
    resources = Resources(**values)
    resources.check()
    return resources


def as_typed(command: str, argv: list[str]) -> str:
    """Return the command line as one line."""
    return f"python -m launch {command} {shlex.join(argv)}".replace("\n", " ")


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
