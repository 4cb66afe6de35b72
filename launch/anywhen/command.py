"""`lockstep submit --anywhen`: write the plan and the batch file of a run, and take its first turns."""

import argparse
import hashlib
import shlex
import sys
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from launch import batch_file
from launch.anywhen.decision import Limits, Plan, Size
from launch.anywhen.record import DIRECTORY, Submission, save
from launch.anywhen.turns import follow
from launch.batch_file import Resources
from launch.layouts import layouts_of
from launch.runs import DIRECTORY as LOGS
from rl.config.checks import check
from rl.config.command_line import field_docs
from rl.config.durations import seconds_of
from rl.config.options import ConfigError
from rl.config.schema import Config, load_config
from rl.dry_run.estimate import estimate
from rl.dry_run.hardware import Hardware
from rl.sandbox.private_directory import make_private

START_S = 300.0
"""Assumed seconds of a job before its first step."""
OPTIONS = [own for own in fields(Limits) if own.name != "partitions"]
"""Limits with an option of their own; the partitions are those of --partition."""


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add --anywhen and an option for each field of `Limits`, described by the field's docstring."""
    group, docs = parser.add_argument_group("jobs that start now (docs/slurm.md)"), field_docs(Limits)
    group.add_argument(
        "--anywhen",
        action="store_true",
        help="cut the run into jobs of up to --nodes and up to --time, as the queue has room",
    )
    group.add_argument(
        "--stay", action="store_true", help="stay until the run has ended, and look for room each minute, too"
    )
    for own in OPTIONS:
        text, kind = docs[own.name] + (f" ({own.default})" if own.default else ""), type(own.default)
        option = "--" + own.name.replace("_", "-")
        metavar = "TEXT" if kind is str else "N" if kind is int else "X"
        group.add_argument(option, metavar=metavar, type=kind, default=own.default, help=text)


def submit_anywhen(arguments: argparse.Namespace, resources: Resources, *, command: str) -> int:
    """Write the plan and the batch file of the run, and take its first turns; return the exit code.

    If the run has jobs in the queue, no other one is requested. command: the command line, for a comment in
    the file.
    """
    limits = _limits(arguments, resources)
    config, overrides = _elastic(arguments, resources)
    ranks = resources.gpus_per_node or resources.ranks_per_node

    def load(further: list[str]) -> Config:
        found = load_config(arguments.config, [*overrides, *further])
        check(found)
        return found

    sizes = [
        Size(nodes, _step_seconds(load(layout), nodes * ranks, ranks), layout)
        for nodes, layout in sorted(layouts_of(config, ranks, load).items())
    ]
    longest_s, not_before = float(seconds_of(resources.time)), 0.0
    if limits.not_before:
        not_before = datetime.fromisoformat(limits.not_before).timestamp()
    lead_s = float(resources.signal_lead_s)
    plan = Plan(sizes, limits, longest_s, START_S, lead_s, not_before=not_before)
    run_dir = Path(config.run.dir).absolute()
    logs = run_dir / LOGS
    make_private(run_dir)
    logs.mkdir(exist_ok=True)
    file = logs / "anywhen.sbatch"
    mark = hashlib.sha256(str(run_dir).encode()).hexdigest()[:6]
    name = f"{config.run.name}-{mark}"
    own: dict = dict(name=name, logs=logs, configs=arguments.config, overrides=overrides, command=command)
    file.write_text(_render(resources, own, run_dir / DIRECTORY))
    directory = save(Submission(plan, str(run_dir), name, str(file), config.run.max_steps))
    for size in sizes:
        print(f"{size.nodes} nodes: {size.step_s:.1f} s per step {' '.join(size.overrides)}")
    if arguments.dry_run:
        print(f"\nnot submitted (--dry-run); {file}")
        return 0
    over = follow(directory, turns=None if arguments.stay else limits.jobs)
    print(over or f"lockstep status {shlex.quote(config.run.dir)}")
    return 0


def _limits(arguments: argparse.Namespace, resources: Resources) -> Limits:
    limits = Limits(
        partitions=resources.partition, **{own.name: getattr(arguments, own.name) for own in OPTIONS}
    )
    if limits.jobs < 2 or limits.node_hours < 0 or not 0 <= limits.efficiency <= 1:
        raise ConfigError(
            f"--jobs={limits.jobs} must be at least 2, because a job requests its successor, "
            f"--node-hours={limits.node_hours:g} 0 or more, --efficiency={limits.efficiency:g} from 0 to 1."
        )
    if resources.scheduler != "slurm":
        raise ConfigError(f"--scheduler={resources.scheduler}: --anywhen asks Slurm; leave it out.")
    return limits


def _elastic(arguments: argparse.Namespace, resources: Resources) -> tuple[Config, list[str]]:
    """Return the config and its overrides; without run.elastic.min_nodes its sizes are 1 to --nodes."""
    overrides = list(arguments.overrides)
    config = load_config(arguments.config, overrides)
    if not config.run.elastic.is_on:
        overrides += ["run.elastic.min_nodes=1", f"run.elastic.max_nodes={resources.nodes}"]
        config = load_config(arguments.config, overrides)
    check(config)
    return config, overrides


def _step_seconds(config: Config, world_size: int, ranks: int) -> float:
    return estimate(config, world_size, Hardware(ranks_per_node=ranks), plan=False).step_seconds


def _render(resources: Resources, own: dict[str, Any], directory: Path) -> str:
    """Return the batch file: `launch.batch_file.render`'s, with the turns around the ranks."""
    resources.requeue = False  # a successor waits instead
    text = batch_file.render(resources, **own)
    head, train = text.split("\ntrain ", 1)
    turns = f"""
export NO_REQUEUE=1
anywhen() {{
    local what=$1
    shift
    PYTHONPATH=$LOCKSTEP_ROOT {shlex.quote(sys.executable)} -m launch.anywhen "$what" \
        {shlex.quote(str(directory))} "$@"
}}
number=$1
words=$(anywhen begin "$number") || exit 0 # the run does not need this job
layout=()
if [ -n "$words" ]; then mapfile -t layout <<<"$words"; fi
anywhen follow &
follower=$!
trap 'code=$?; kill $follower || true; anywhen end "$number" $code' EXIT
"""
    return f'{head}{turns}train {train.rstrip()} "${{layout[@]}}"\n'
