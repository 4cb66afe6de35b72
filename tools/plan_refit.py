"""Compute the traffic of a refit from a model's config, without weights or GPUs, for any number of ranks.

    lockstep plan refit --model configs/models/qwen2.5-32b \\
        --train tp=8,pp=2 --rollout tp=4 --world-size 128
    lockstep plan refit --model configs/models/deepseek-v3 \\
        --train tp=8,pp=16,ep=32 --rollout tp=32 --world-size 1024

Prints bytes per rank (min, mean, max) and the total of all ranks: bytes that stay on their rank, bytes
received and sent within a node and between nodes, the least that any refit must receive (the rank's part of
the engine that it does not train), and the bytes that a refit by gathering every weight on every rank would
receive. A second table has the number of ranks with which a rank exchanges messages. The plan is a run's plan
(rl/refit/plan.py). NCCL's memory is an estimate (rl/refit/connections.py).

Times are lower bounds from bytes and link speeds, without latency: for the busiest rank, and with a barrier
after each batch. `--train` takes tp, pp, ep and etp (default: 1 with ep > 1, else tp), `--rollout` takes tp
and pp.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser
from rl.config.layout_checks import check_has_experts, check_rollout_grid, check_training_grid
from rl.config.schema import Config
from rl.models import architecture
from rl.models.placement import RolloutPlacement, TrainingPlacement, count_experts
from rl.refit.connections import connection_bytes
from rl.refit.plan import FAR_IN, FAR_OUT, NEAR_IN, NEAR_OUT
from rl.refit.traffic import RefitTraffic, refit_traffic

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
GIB = 1 << 30


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--model", metavar="PATH", type=Path, required=True, help="Hugging Face directory or config.json")
    add("--train", metavar="tp=..,pp=..,ep=..", required=True, help="layout of training")
    add("--rollout", metavar="tp=..", required=True, help="layout of a generation replica")
    add("--world-size", metavar="RANKS", type=_positive, required=True)
    add("--ranks-per-node", metavar="RANKS", type=_positive, default=8)
    add("--dtype", choices=ITEMSIZES, default="bfloat16", help="dtype of the weights (bfloat16)")
    add("--buffer-mib", metavar="MIB", type=_positive, default=512, help="refit.buffer_mib of the run (512)")
    for where, default, place in (("nvlink", 3600.0, "within a node"), ("nic", 400.0, "between nodes")):
        text = f"Gbit/s of a rank, each way, {place} ({default:.0f})"
        add(f"--{where}-gbps", metavar="GBIT", type=float, default=default, help=text)
    args = parser.parse_args(argv)
    try:
        traffic = traffic_of(args)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(
        report(
            traffic, nvlink_gbps=args.nvlink_gbps, nic_gbps=args.nic_gbps, ranks_per_node=args.ranks_per_node
        )
    )


def traffic_of(args: argparse.Namespace) -> RefitTraffic:
    """Compute the traffic of the given layouts. Raises OSError, and ValueError for invalid layouts."""
    file = args.model / "config.json" if args.model.is_dir() else args.model
    if not file.is_file():
        raise ValueError(
            f"--model={args.model}: there is no {file}; name a model's directory or config.json."
        )
    hf = json.loads(file.read_text())
    if not hf.get("architectures") or not hf.get("num_hidden_layers"):
        raise ValueError(
            f"{args.model} is not the config.json of a language model: architectures or num_hidden_layers is "
            "missing."
        )
    weights, num_layers, world = architecture(hf).weights(hf), hf["num_hidden_layers"], args.world_size
    train = _layout("--train", args.train, {"tp", "pp", "vpp", "ep", "etp"})
    rollout = _layout("--rollout", args.rollout, {"tp", "pp", "ep"})
    sizes = {name: size for name, size in rollout.items() if name != "pp"}
    config = Config()
    for section, given in ((config.training, train), (config.rollout, sizes)):
        for name, size in given.items():
            setattr(section, name, size)
    check_training_grid(config, world, hf)
    check_has_experts(config, [hf])
    check_rollout_grid(config, world, hf)
    training, experts = config.training, count_experts(weights)
    return refit_traffic(
        weights,
        TrainingPlacement(
            world,
            training.tp,
            training.pp,
            num_layers,
            ep=training.ep,
            etp=training.expert_tp if experts else None,
            num_experts=experts,
            vpp=training.vpp,
        ),
        RolloutPlacement(
            world,
            config.rollout.tp,
            num_layers,
            pp=rollout.get("pp", 1),
            ep=config.rollout.ep,
            num_experts=experts,
        ),
        ranks_per_node=args.ranks_per_node,
        itemsize=ITEMSIZES[args.dtype],
        buffer_bytes=args.buffer_mib << 20,
    )


def _layout(option: str, text: str, known: set[str]) -> dict[str, int]:
    given = {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
    for name, value in given.items():
        if name not in known or not (value.isdigit() and int(value) > 0):
            raise ValueError(
                f"{option} {text}: found {name}={value}, but it takes {', '.join(sorted(known))}, e.g. "
                "tp=8,pp=2."
            )
    return {name: int(value) for name, value in given.items()}


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be an integer of 1 or more")
    return int(text)


def report(traffic: RefitTraffic, *, nvlink_gbps: float, nic_gbps: float, ranks_per_node: int) -> str:
    """Return the table and the time estimates."""
    received = traffic.near_in + traffic.far_in
    rows = {
        "stays on the rank": traffic.stays,
        "received within the node": traffic.near_in,
        "received from other nodes": traffic.far_in,
        "received": received,
        "least possible": traffic.lower_bound,
        "sent within the node": traffic.near_out,
        "sent to other nodes": traffic.far_out,
        "gathering every weight": traffic.gather,
        "largest batch": traffic.peak_buffer,
        "NCCL's connections": connection_bytes(traffic.partners, ranks_per_node, nic_gbps / 8),
    }
    lines = [f"{'GiB':<28}{'min':>10}{'mean':>10}{'max':>10}{'all ranks':>12}"]
    for name, values in rows.items():
        total = "" if name in ("largest batch", "NCCL's connections") else f"{values.sum() / GIB:.2f}"
        numbers = (values.min(), values.mean(), values.max())
        lines.append(f"{name:<28}{''.join(f'{number / GIB:>10.3f}' for number in numbers)}{total:>12}")

    def seconds(load: np.ndarray) -> float:
        """Return the time of the busiest rank; all links work in both directions at the same time."""
        near, far = load[[NEAR_IN, NEAR_OUT]].max(), load[[FAR_IN, FAR_OUT]].max()
        return 8e-9 * max(near / nvlink_gbps, far / nic_gbps)

    whole = np.stack([traffic.stays, traffic.near_in, traffic.far_in, traffic.near_out, traffic.far_out])
    one_node = len(received) <= ranks_per_node
    slowest = 8e-9 * traffic.gather.max() / (nvlink_gbps if one_node else nic_gbps)
    lines += ["", f"{'partners':<28}{'min':>10}{'mean':>10}{'max':>10}"]
    for name, counts in zip(
        ("receives from, on its node", "elsewhere", "sends to, on its node", "elsewhere"), traffic.partners
    ):
        lines.append(f"{name:<28}{counts.min():>10}{counts.mean():>10.1f}{counts.max():>10}")
    lines += [
        "",
        f"batches                     {len(traffic.batches)}",
        f"seconds, busiest rank       {seconds(whole):.2f}",
        f"seconds, batch by batch     {sum(map(seconds, traffic.batches)):.2f}",
        f"seconds, gathering          {slowest:.2f}",
        f"gathering / received        {traffic.gather.sum() / received.sum():.1f}"
        if received.any()
        else "nothing crosses ranks",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
