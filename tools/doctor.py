"""Check whether the nodes of an allocation are fit for training.

    lockstep doctor --config configs/quickstart.yaml
    srun --ntasks-per-node=1 lockstep doctor --config CONFIG   one process per node is enough
    torchrun --nproc-per-node 8 -m lockstep doctor --gpus 8    one per rank also checks their links
    lockstep doctor --opened 'lockstep train --config CONFIG'  which files does a rank open?

Checks GPUs (count, idle memory, ECC and Xid errors, clocks), the driver, glibc, /dev/shm, limits, disks and
inodes, home and TMPDIR, what modules left in the environment, installed versions, files that the config
names, clocks of nodes and file system, network interfaces, the transport in use, and the all-reduce bandwidth
between pairs of nodes. Prints each problem with its nodes and its remedy, and the bad nodes as an option of
sbatch. Exit code 0: no problem or only warnings; 2: a check failed. --json prints one object instead.
"""

import argparse
import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import add_config, make_parser
from rl.config.schema import FIRST_KEYS, Config, load_config
from rl.runtime.ranks import Ranks, discover
from tools.node_checks import (
    Finding,
    bad,
    check_compilers,
    check_disks,
    check_gpus,
    check_limits,
    check_readable,
    check_versions,
    config_paths,
)
from tools.opened_files import count_opened
from tools.site_checks import check_site

ByNode = dict[str, list[Finding]]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        if arguments.opened:
            code, opened = count_opened(shlex.split(arguments.opened))
            print(opened)
            return code
        ranks = discover()
        findings = own_findings(arguments, ranks)
        alone = ranks.world_size == 1
        by_node = {socket.gethostname(): findings} if alone else findings_of_all(arguments, ranks, findings)
    except (ValueError, RuntimeError) as error:  # RuntimeError: a rank is missing at the rendezvous
        print(f"error: {error}", file=sys.stderr)
        return 2
    if ranks.rank == 0:
        print(as_json(by_node) if arguments.json else as_text(by_node, verbose=arguments.verbose))
    return 2 if bad_nodes(by_node) else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    about = "check the models, data and run directory of this YAML file"
    add_config(parser, Config, first=FIRST_KEYS, required=False, about=about)
    opened_help = "only run this command under strace, and print the files that it opens by mount point"
    add("--opened", metavar="COMMAND", help=opened_help)
    add("--gpus", metavar="N", type=int, help="GPUs that a node must have (SLURM_GPUS_ON_NODE)")
    add("--path", metavar="DIR", type=Path, action="append", default=[], help="also a directory to write to")
    add("--min-free-gib", metavar="X", type=float, default=10.0, help="minimum free space there, in GiB (10)")
    add("--max-skew", metavar="S", type=float, default=1.0, help="maximum clock difference, in s (1)")
    add("--mib", metavar="N", type=int, default=64, help="message of the bandwidth test, in MiB (64)")
    add("--rounds", metavar="N", type=int, default=7, help="rounds of that test; 0: no test (7)")
    slow_help = "a pair below this share of the median is slow (0.5)"
    add("--slow-share", metavar="X", type=float, default=0.5, help=slow_help)
    add("--min-gb-s", metavar="X", type=float, default=0.0, help="or below this many GB/s (0)")
    add("--json", action="store_true", help="print one JSON object")
    add("--verbose", action="store_true", help="also print passed checks")
    return parser.parse_run(sys.argv[1:] if argv is None else argv)


def own_findings(arguments: argparse.Namespace, ranks: Ranks) -> list[Finding]:
    """Return the findings of this node alone. Raises ValueError for a config that cannot be read."""
    expected = arguments.gpus
    if expected is None and "SLURM_GPUS_ON_NODE" in os.environ:
        expected = int(os.environ["SLURM_GPUS_ON_NODE"])
    written = list(arguments.path)
    paths: dict[str, list[str]] = {}
    if arguments.config:
        config = load_config(arguments.config, arguments.overrides)
        written.append(Path(config.run.dir))
        paths = config_paths(config)
    findings = (
        check_gpus(expected) + check_limits(ranks.local_world_size, ranks.world_size) + check_versions()
    )
    if shutil.which("nvidia-smi"):
        findings += check_compilers()
    findings += check_site(written, ranks_on_node=ranks.local_world_size, max_skew_s=arguments.max_skew)
    findings += check_disks(written, min_free_gib=arguments.min_free_gib)
    return findings + (check_readable(paths) if paths else [])


def findings_of_all(arguments: argparse.Namespace, ranks: Ranks, own: list[Finding]) -> ByNode:
    """Return the findings of every node and its links, identical on all ranks. Collective over the world."""
    from rl.runtime.rendezvous import join_ranks

    ranks = join_ranks(ranks)
    ranks.export()
    with tempfile.NamedTemporaryFile("r", prefix="nccl-") as log:
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=log.name)
        try:
            import torch.distributed as dist
        except (ImportError, OSError) as error:  # the findings of this node say why; other ranks wait in vain
            text = f"torch cannot be loaded, so the links are not checked: {error}"
            print(as_text({socket.gethostname(): [*own, bad("versions", text)]}, verbose=arguments.verbose))
            sys.exit(2)

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
            for host, findings in zip(hosts, gather_objects(own, types=(Finding,))):
                # A finding of several ranks of a node is reported once.
                by_node[host] += [finding for finding in findings if finding not in by_node[host]]
            dist.barrier()
    return by_node


def bad_nodes(by_node: ByNode) -> list[str]:
    return [host for host, findings in by_node.items() if any(finding.level == "bad" for finding in findings)]


def everywhere(by_node: ByNode) -> list[Finding]:
    """Return the bad findings that all of several nodes have, so that no single node is at fault."""
    first, *others = by_node.values()
    return [f for f in first if others and f.level == "bad" and all(f in findings for findings in others)]


def excluded(by_node: ByNode) -> list[str]:
    """Return the nodes to exclude: nodes with a bad finding that not all nodes have."""
    shared = everywhere(by_node)
    own = {
        host: [f for f in found if f.level == "bad" and f not in shared] for host, found in by_node.items()
    }
    return [host for host, findings in own.items() if findings]


def as_text(by_node: ByNode, *, verbose: bool) -> str:
    """Return the report, each finding once with its nodes; passed checks are included with `verbose`."""
    nodes_of: dict[Finding, list[str]] = {}
    for host, findings in by_node.items():
        for finding in findings:
            if verbose or finding.level != "ok":
                nodes_of.setdefault(finding, []).append(host)
    lines = []
    order = ("bad", "warn", "ok")
    for finding, hosts in sorted(nodes_of.items(), key=lambda item: order.index(item[0].level)):
        shared = len(hosts) == len(by_node) > 1
        where = f"all {len(hosts)} nodes" if shared else ",".join(hosts)
        lines.append(f"{finding.level:<5} {where}: {finding.check}: {finding.text}")
        if finding.remedy:
            lines.append(f"      remedy: {finding.remedy}")
    number = len(bad_nodes(by_node))
    lines.append(f"{len(by_node)} node{'s' if len(by_node) > 1 else ''}, {number} with a failed check")
    if out := excluded(by_node):
        lines.append(f"--exclude={','.join(out)}")
    return "\n".join(lines)


def as_json(by_node: ByNode) -> str:
    nodes = {host: [vars(finding) for finding in findings] for host, findings in by_node.items()}
    bad = bad_nodes(by_node)
    return json.dumps({"ok": not bad, "bad": bad, "exclude": excluded(by_node), "nodes": nodes})


if __name__ == "__main__":
    sys.exit(main())
