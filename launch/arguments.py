"""Command-line options that several launch commands share."""

import argparse
import shlex
import sys
from collections.abc import Iterable
from dataclasses import fields

from launch.batch_file import Resources
from launch.schedulers import SCHEDULERS
from rl.config.command_line import field_docs

OPTIONS = [
    own.name for own in fields(Resources) if own.name != "scheduler" and type(own.default) in (int, str)
]
"""Fields of `Resources` that have a command-line option with a number or a text as its value."""


def add_fields(group: argparse._ArgumentGroup, cls: type, names: Iterable[str], *required: str) -> None:
    """Add an option for each named field of a dataclass, described by the field's docstring."""
    docs, defaults = field_docs(cls), cls()
    for name in names:
        default = getattr(defaults, name)
        text = docs[name] + (f" ({default})" if default else "")
        flag, kind = "--" + name.removesuffix("_s").replace("_", "-"), type(default)
        metavar = "N" if kind is int else "TEXT" if kind is str else "X"
        group.add_argument(
            flag, dest=name, metavar=metavar, type=kind, default=default, required=name in required, help=text
        )


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of `Resources`."""
    group = parser.add_argument_group("resources")
    group.add_argument("--scheduler", choices=list(SCHEDULERS), default="slurm", help="(slurm)")
    add_fields(group, Resources, OPTIONS, "nodes")
    group.add_argument("--no-requeue", dest="requeue", action="store_false", help="never requeue the job")
    sbatch_help = "any other option of sbatch (qsub, bsub, flux batch), e.g. --sbatch=--constraint=h100"
    group.add_argument("--sbatch", metavar="OPTION", action="append", default=[], help=sbatch_help)


def resources_of(arguments: argparse.Namespace) -> Resources:
    """Return the resources that the options request. Raises ConfigError for invalid values."""
    values = {name: getattr(arguments, name) for name in (*OPTIONS, "scheduler", "requeue", "sbatch")}
    resources = Resources(**values)
    resources.check()
    return resources


def as_typed(command: str, argv: list[str]) -> str:
    """Return the command as the user typed it, on one line."""
    return f"lockstep {command} {shlex.join(argv)}".replace("\n", " ")


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
