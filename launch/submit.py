"""`lockstep submit`: submit one run as a job of Slurm, PBS Pro, LSF or Flux.

The command writes the batch file RUN_DIR/launch/job.sbatch (or .pbs, .lsf, .flux), prints an estimate of
memory and time and the GPU-hours, and submits the file. With --dry-run it does not submit the file, but
prints it with the config and the whole estimate. With --anywhen the run becomes several jobs that
start now (docs/slurm.md).
"""

import shlex
import sys
from pathlib import Path

from launch.anywhen.command import add_anywhen, submit_anywhen
from launch.arguments import add_resources, as_typed, resources_of, warn
from launch.batch_file import Resources
from launch.runs import DIRECTORY, note_job
from launch.schedulers import SCHEDULERS
from launch.slurm import undisturbed
from rl.config.checks import check
from rl.config.command_line import add_config, make_parser
from rl.config.elastic import JobLimits
from rl.config.named_paths import absent_paths
from rl.config.options import to_yaml
from rl.config.schema import FIRST_KEYS, Config, changed, load_config
from rl.dry_run.changes import cheapest_change
from rl.dry_run.estimate import estimate
from rl.dry_run.hardware import Hardware
from rl.dry_run.report import report, verdict
from rl.sandbox.private_directory import make_private


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    add_config(parser, Config, first=FIRST_KEYS)
    parser.add_argument("--dry-run", action="store_true", help="write and print, but do not submit")
    parser.add_argument(
        "--force", action="store_true", help="submit even if the memory estimate does not fit"
    )
    add_resources(parser)
    add_anywhen(parser)
    arguments = parser.parse_run(argv)
    resources = resources_of(arguments)
    if arguments.anywhen:
        return submit_anywhen(arguments, resources, command=as_typed("submit", argv))
    config = load_config(arguments.config, arguments.overrides)
    for warning in check(config):
        warn(warning)
    if config.run.limits != JobLimits():
        warn("run.limits has no effect on one job; add --anywhen, or leave it out.")
    directory = Path(config.run.dir).absolute() / DIRECTORY
    scheduler = SCHEDULERS[resources.scheduler]
    file = directory / f"job{scheduler.suffix}"
    text = scheduler.render(
        resources,
        name=config.run.name,
        logs=directory,
        configs=arguments.config,
        overrides=arguments.overrides,
        command=as_typed("submit", argv),
    )
    make_private(directory.parent)
    directory.mkdir(exist_ok=True)
    file.write_text(text)
    print(f"# {file}")
    if arguments.dry_run:
        print(f"{text}\n# the config, without defaults\n{to_yaml(changed(config))}")
    fits = print_estimate(config, resources, whole=arguments.dry_run)
    if not fits and not arguments.force:
        print("not submitted: it does not fit; --force submits it", file=sys.stderr)
        return 2
    if arguments.dry_run:
        print(f"\nnot submitted (--dry-run); {scheduler.command(file)}")
        return 0
    with undisturbed():
        job = scheduler.submit(file, name=config.run.name)
        note_job(directory, job)
        print(f"\nsubmitted job {job}; lockstep status {shlex.quote(config.run.dir)}", flush=True)
    return 0


def print_estimate(config: Config, resources: Resources, *, whole: bool) -> bool:
    """Print seconds of a step, GPU-hours, whether the run fits into memory and which of its paths are not
    here; return whether it fits.

    Nothing is estimated for CPU nodes, and the result is True. whole: also print the report of
    train_rl.py --dry-run.
    """
    absent = absent_paths(config)
    if not resources.gpus_per_node:
        print(f"# {resources.world_size} ranks on CPU nodes: no estimate of GPU memory", *absent, sep="\n")
        return True
    found = estimate(config, resources.world_size, Hardware(ranks_per_node=resources.gpus_per_node))
    print(report(found) if whole else f"seconds per step on an H100, estimated: {found.step_seconds:.3g}")
    print(f"GPU-hours of the allocation, at most: {resources.gpu_hours:,.1f}")
    print(verdict(found, cheapest_change(found) if found.problems else None), *absent, sep="\n")
    return not found.problems
