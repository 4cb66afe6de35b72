"""Options that several commands have."""

import argparse
import shlex
import sys

from launch.batch_file import Resources


def add_resources(parser: argparse.ArgumentParser) -> None:
    """An option for each field of `Resources`."""
    default = Resources()
    group = parser.add_argument_group("what to ask Slurm for")
    group.add_argument("--nodes", metavar="N", type=int, required=True, help="nodes")
    gpus = default.gpus_per_node
    group.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=int,
        default=gpus,
        help=f"GPUs, a rank each ({gpus}); 0: CPU nodes",
    )
    group.add_argument("--ranks-per-node", metavar="N", type=int, default=0, help="ranks of a CPU node")
    group.add_argument(
        "--cpus-per-task", metavar="N", type=int, default=0, help="cores of a rank (what the site gives)"
    )
    group.add_argument("--time", metavar="T", default=default.time, help=f"time limit ({default.time})")
    group.add_argument("--mem", metavar="SIZE", default="", help="memory of a node (GPU nodes: all)")
    for name in ("account", "partition", "qos"):
        group.add_argument(f"--{name}", metavar="NAME", default="", help=f"{name} (your site's default)")
    lead = default.signal_lead_s
    lead_help = f"seconds before the end to stop and save in ({lead})"
    group.add_argument("--signal-lead", metavar="S", type=int, default=lead, help=lead_help)
    group.add_argument("--no-requeue", action="store_true", help="the job is never requeued")
    sbatch_help = "any other option of sbatch, as --sbatch=--constraint=h100"
    group.add_argument("--sbatch", metavar="OPTION", action="append", default=[], help=sbatch_help)


def resources_of(arguments: argparse.Namespace) -> Resources:
    """Raises ConfigError for resources that cannot be."""
    resources = Resources(
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        ranks_per_node=arguments.ranks_per_node,
        cpus_per_task=arguments.cpus_per_task,
        time=arguments.time,
        mem=arguments.mem,
        account=arguments.account,
        partition=arguments.partition,
        qos=arguments.qos,
        signal_lead_s=arguments.signal_lead,
        requeue=not arguments.no_requeue,
        sbatch=arguments.sbatch,
    )
    resources.check()
    return resources


def as_typed(command: str, argv: list[str]) -> str:
    """The command line, in one line, to note in a file."""
    return f"python -m launch {command} {shlex.join(argv)}".replace("\n", " ")


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
