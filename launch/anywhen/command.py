"""`lockstep submit --anywhen`: write the plan and the batch file of a run, and take its first turns."""

import argparse
import hashlib
import math
import os
import shlex
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from launch import batch_file, slurm
from launch.anywhen import queue
from launch.anywhen.decision import Plan, Size
from launch.anywhen.record import DIRECTORY, records, save
from launch.anywhen.turns import follow
from launch.batch_file import Resources
from launch.layouts import layouts_of
from launch.runs import DIRECTORY as LOGS
from rl.config.checks import check
from rl.config.durations import seconds_of
from rl.config.options import ConfigError
from rl.config.schema import Config, load_config
from rl.dry_run.estimate import estimate
from rl.dry_run.hardware import Hardware
from rl.sandbox.private_directory import make_private

GUARD = r"""
again() { # this node may lack a file, or the disk be full for some time; but scancel is final
    trap '' TERM
    case "$(squeue -h -t all -j "$SLURM_JOB_ID" -o %T) ${SLURM_RESTART_COUNT:-0}" in
    "RUNNING "[012])
        minutes=$((3 * 6 ** ${SLURM_RESTART_COUNT:-0})) # more than Slurm's own pause of 2 minutes
        scontrol requeue "$SLURM_JOB_ID" &&
            scontrol update JobId="$SLURM_JOB_ID" StartTime="now+${minutes}minutes"
        ;;
    esac
}
trap again EXIT
"""
"""Part of a job's batch file before it reads a file: if the job ends before its turns begin, it starts again,
perhaps elsewhere, after 3, 18 and 108 minutes. Slurm, too, requeues a job until then, for example after a
prolog that fails."""
TURNS = r"""
export NO_REQUEUE=1 # a successor waits instead
turns=(env "PYTHONPATH=$LOCKSTEP_ROOT" "LOCKSTEP_GIVEN=/proc/$$/environ") # a path may have =
turns+=(bash -c 'exec "$@"' turns {python} -m launch.anywhen.turns)
record={directory} number=$1
code=0
words=$("${{turns[@]}}" begin "$record" "$number" $SECONDS) || code=$?
if [ $code = 0 ] || [ $code = 3 ]; then trap - EXIT; fi
if [ $code != 0 ]; then exit 0; fi # 3: the run does not need this job
scontrol update JobId="$SLURM_JOB_ID" Requeue=0 || true
layout=()
if [ -n "$words" ]; then mapfile -t layout <<<"$words"; fi
"${{turns[@]}}" follow "$record" "$number" $SECONDS &
follower=$! terminated=
trap terminated=1 TERM # when Slurm ends the job; the follower has the signal, too, and requests a successor
finish() {{
    if [ -n "$terminated" ] && wait $follower; then return; fi
    {{ kill -KILL $follower && wait $follower; }} 2>/dev/null || true
    "${{turns[@]}}" end "$record" "$number" $SECONDS "$1"
}}
trap 'finish $?' EXIT
train {train} "${{layout[@]}}"
"""
"""End of a job's batch file: the turns around the ranks."""


def add_anywhen(parser: argparse.ArgumentParser) -> None:
    """Add --anywhen and --stay."""
    group = parser.add_argument_group("jobs that start now (docs/slurm.md); run.limits has their limits")
    about = "cut the run into jobs of up to --nodes and up to --time, as the queue has room"
    group.add_argument("--anywhen", action="store_true", help=about)
    stay = "stay until the run has ended, and look for room each minute, too"
    group.add_argument("--stay", action="store_true", help=stay)


def submit_anywhen(arguments: argparse.Namespace, resources: Resources, *, command: str) -> int:
    """Write the plan and the batch file of the run, and take its first turns; return the exit code.

    With jobs of the run in the queue, no more are requested than its limits allow. command: the command line,
    for a comment in the file.
    """
    if resources.scheduler != "slurm":
        raise ConfigError(f"--scheduler={resources.scheduler}: --anywhen asks Slurm; leave it out.")
    config, overrides = _elastic(arguments, resources)
    directory = Path(config.run.dir).absolute() / DIRECTORY
    logs = directory.parent / LOGS
    make_private(directory.parent)
    logs.mkdir(exist_ok=True)
    name = f"{config.run.name}-{hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:6]}"
    resources.requeue = True
    text = batch_file.render(
        resources, name=name, logs=logs, configs=arguments.config, overrides=overrides, command=command
    )
    head, train = text.split("\ntrain ", 1)
    words = {"python": shlex.quote(sys.executable), "directory": shlex.quote(str(directory))}
    limits, file = config.run.limits, logs / "anywhen.sbatch"
    partition = resources.partition or os.environ.get("SBATCH_PARTITION", "")
    plan = Plan(
        sizes=_sizes(config, arguments.config, overrides, resources),
        limits=limits,
        longest_s=float(seconds_of(resources.time)),
        lead_s=float(resources.signal_lead_s),
        max_steps=config.run.max_steps,
        partitions=limits.partitions or partition.split(","),
        not_before=datetime.fromisoformat(limits.not_before).timestamp() if limits.not_before else 0.0,
        name=name,
        file=str(file),
    )
    if arguments.dry_run and records(directory):
        file = logs / "anywhen-dry-run.sbatch"
        directory = directory / "dry-run"  # the jobs of the run read its plan
        plan = replace(plan, file=str(file))
    head = head.replace("\nsource ", f"\n{GUARD}source ", 1)
    save(plan, directory, head + TURNS.format(train=train.rstrip(), **words))
    for size in plan.sizes:
        print(f"{size.nodes} nodes: {size.step_s:.1f} s per step {' '.join(size.overrides)}")
    if arguments.dry_run:
        print(f"\nnot submitted (--dry-run); {file}")
        return 0
    over = follow(directory, turns=math.inf if arguments.stay else limits.jobs)
    if over:
        print(f"no further job, because {over}")
        return 0
    if not (jobs := queue.jobs_of(plan)[0]):
        raise slurm.SlurmError(
            f"no job of {config.run.dir} is in the queue: Slurm refused one, here or some minutes ago; "
            "submit again later, or with --stay."
        )
    print(f"{len(jobs)} jobs in the queue; lockstep status {shlex.quote(config.run.dir)}")
    return 0


def _elastic(arguments: argparse.Namespace, resources: Resources) -> tuple[Config, list[str]]:
    """Return the config and its overrides; without run.elastic.min_nodes its sizes are 1 to --nodes."""
    overrides = list(arguments.overrides)
    config = load_config(arguments.config, overrides)
    if not config.run.elastic.is_on:
        overrides += ["run.elastic.min_nodes=1", f"run.elastic.max_nodes={resources.nodes}"]
        config = load_config(arguments.config, overrides)
    check(config)
    return config, overrides


def _sizes(config: Config, files: list[str], overrides: list[str], resources: Resources) -> list[Size]:
    """Return the numbers of nodes with a layout that fits, each with the dry run's seconds of a step."""
    ranks = resources.gpus_per_node or resources.ranks_per_node

    def load(layout: list[str]) -> Config:
        found = load_config(files, [*overrides, *layout])
        check(found)
        return found

    def step_s(nodes: int, layout: list[str]) -> float:
        hardware = Hardware(ranks_per_node=ranks)
        return estimate(load(layout), nodes * ranks, hardware, plan=False).step_seconds

    found = sorted(layouts_of(config, ranks, load).items())
    return [Size(nodes, step_s(nodes, layout), layout) for nodes, layout in found]
