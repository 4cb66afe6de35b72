"""Is every node of an allocation fit to train on? By hand on one node, or as the first step of a job on all of them.

    python tools/doctor.py --config configs/quickstart.yaml
    srun --ntasks-per-node=1 python tools/doctor.py --config CONFIG          one process per node is enough
    torchrun --nproc-per-node 8 tools/doctor.py --gpus 8                     one per rank checks their links too

Looks at GPUs (count, idle memory, ECC and Xid errors, clocks), /dev/shm, limits, disks and inodes, installed versions, the files
that the config names, clocks against each other, the transport that is really used, and the all-reduce bandwidth between pairs
of nodes. Prints what is not in order, node by node, and the bad nodes as an option of sbatch. Exit code 0: all in order or
only warnings; 2: something is bad. --json prints one object instead.
"""

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Run as a script, python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.schema import load_config  # noqa: E402
from rl.runtime.ranks import Ranks, discover  # noqa: E402
from tools.node_checks import (  # noqa: E402
    Finding,
    check_disks,
    check_gpus,
    check_limits,
    check_readable,
    check_versions,
    config_paths,
)

ByNode = dict[str, list[Finding]]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        ranks = discover()
        findings = own_findings(arguments, ranks)
        by_node = (
            {socket.gethostname(): findings}
            if ranks.world_size == 1
            else findings_of_all(arguments, ranks, findings)
        )
    except (
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: a rank did not come, which the meeting says in a sentence
        print(f"error: {error}", file=sys.stderr)
        return 2
    if ranks.rank == 0:
        print(as_json(by_node) if arguments.json else as_text(by_node, verbose=arguments.verbose))
    return 2 if bad_nodes(by_node) else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", metavar="FILE", help="config whose models, data and run directory are looked at"
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="config overrides")
    parser.add_argument(
        "--gpus", metavar="N", type=int, help="GPUs that a node must have (SLURM_GPUS_ON_NODE)"
    )
    parser.add_argument(
        "--path", metavar="DIR", type=Path, action="append", default=[], help="a directory that is written to"
    )
    parser.add_argument("--min-free-gib", metavar="X", type=float, default=10.0, help="least room there (10)")
    parser.add_argument(
        "--max-skew", metavar="S", type=float, default=1.0, help="largest difference of clocks in seconds (1)"
    )
    parser.add_argument("--mib", metavar="N", type=int, default=64, help="size of the bandwidth test (64)")
    parser.add_argument(
        "--rounds", metavar="N", type=int, default=7, help="rounds of pairs in it; 0: none (7)"
    )
    slow_help = "a pair below so much of the median is slow (0.5)"
    parser.add_argument("--slow-share", metavar="X", type=float, default=0.5, help=slow_help)
    parser.add_argument(
        "--min-gb-s", metavar="X", type=float, default=0.0, help="and one below this, in GB/s (0)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verbose", action="store_true", help="print what is in order too")
    return parser.parse_intermixed_args(argv)


def own_findings(arguments: argparse.Namespace, ranks: Ranks) -> list[Finding]:
    """Of this node, without the others. ValueError for a config that cannot be read."""
    expected = arguments.gpus
    if expected is None and "SLURM_GPUS_ON_NODE" in os.environ:
        expected = int(os.environ["SLURM_GPUS_ON_NODE"])
    written = list(arguments.path)
    paths: dict[str, list[str]] = {}
    if arguments.config:
        config = load_config(arguments.config, arguments.overrides)
        written.append(Path(config.run.dir))
        paths = config_paths(config)
    findings = check_gpus(expected) + check_limits(ranks.local_world_size) + check_versions()
    findings += check_disks(written, min_free_gib=arguments.min_free_gib)
    return findings + (check_readable(paths) if paths else [])


def findings_of_all(arguments: argparse.Namespace, ranks: Ranks, own: list[Finding]) -> ByNode:
    """Of every node, with what lies between them. Collective over the world; alike on every rank."""
    from rl.runtime.rendezvous import join_ranks

    ranks = join_ranks(ranks)
    ranks.export()
    with tempfile.NamedTemporaryFile("r", prefix="nccl-") as log:
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=log.name)
        import torch.distributed as dist

        from rl.runtime.collectives import gather_objects
        from rl.runtime.session import session
        from tools.link_checks import check_clocks, check_transport, judge_pairs, measure_pairs

        with session(ranks) as device:
            hosts = gather_objects(socket.gethostname())
            by_node = check_clocks(hosts, max_skew_s=arguments.max_skew)
            if arguments.rounds:
                speeds = measure_pairs(hosts, device, mib=arguments.mib, rounds=arguments.rounds)
                for host, findings in judge_pairs(
                    speeds, slow_share=arguments.slow_share, min_gb_s=arguments.min_gb_s
                ).items():
                    by_node[host] += findings
            own = own + check_transport(hosts, device, log.read())
            for host, findings in zip(hosts, gather_objects(own)):
                # What all ranks of a node saw is said once.
                by_node[host] += [finding for finding in findings if finding not in by_node[host]]
            dist.barrier()
    return by_node


def bad_nodes(by_node: ByNode) -> list[str]:
    return [host for host, findings in by_node.items() if any(finding.level == "bad" for finding in findings)]


def everywhere(by_node: ByNode) -> list[Finding]:
    """What is bad on every one of several nodes: then no node is at fault."""
    first, *others = by_node.values()
    return [f for f in first if others and f.level == "bad" and all(f in findings for findings in others)]


def excluded(by_node: ByNode) -> list[str]:
    """Nodes to do without: those with something bad that not all have."""
    shared = everywhere(by_node)
    return [
        host
        for host, findings in by_node.items()
        if any(f.level == "bad" and f not in shared for f in findings)
    ]


def as_text(by_node: ByNode, *, verbose: bool) -> str:
    """The report; without `verbose` what is in order is left out."""
    shared = everywhere(by_node)
    lines = [f"bad   all nodes: {finding.check}: {finding.text}" for finding in shared]
    for host, findings in by_node.items():
        for finding in findings:
            if finding not in shared and (verbose or finding.level != "ok"):
                lines.append(f"{finding.level:<5} {host}: {finding.check}: {finding.text}")
    number = len(bad_nodes(by_node))
    lines.append(f"{len(by_node)} node{'s' if len(by_node) > 1 else ''}, {number} with something bad")
    if out := excluded(by_node):
        lines.append(f"--exclude={','.join(out)}")
    return "\n".join(lines)


def as_json(by_node: ByNode) -> str:
    nodes = {host: [vars(finding) for finding in findings] for host, findings in by_node.items()}
    return json.dumps(
        {
            "ok": not bad_nodes(by_node),
            "bad": bad_nodes(by_node),
            "exclude": excluded(by_node),
            "nodes": nodes,
        }
    )


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
