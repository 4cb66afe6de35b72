"""What a refit would move, from a model's config alone: no weights, no GPUs, any number of ranks.

    python tools/plan_refit.py --model configs/models/qwen2.5-32b --train tp=8,pp=2 --rollout tp=4 --world-size 128
    python tools/plan_refit.py --model configs/models/deepseek-v3 --train tp=8,pp=16,ep=32 --rollout tp=32 --world-size 1024

Prints bytes per rank (least, mean, most) and of all ranks: what stays on its rank, moves within a node and between nodes, each
as received and as sent; the least any refit must bring (the rank's part of the engine that it does not train); and what
gathering every weight on every rank would bring. The plan is the one that a run makes (rl/refit/plan.py).

Times are bounds from bytes and link speeds, without latency: the busiest rank's, and with all ranks waiting for each other
after each batch. `--train` takes tp, pp, ep and etp (left out: 1 with ep > 1, else tp), `--rollout` tp and pp.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

# Run as a script, python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.layout_checks import check_rollout_grid, check_training_grid  # noqa: E402
from rl.config.schema import Config, Rollout, Training  # noqa: E402
from rl.models import architecture  # noqa: E402
from rl.models.placement import RolloutPlacement, TrainingPlacement, count_experts  # noqa: E402
from rl.refit.plan import FAR_IN, FAR_OUT, NEAR_IN, NEAR_OUT  # noqa: E402
from rl.refit.traffic import Survey, survey_refit  # noqa: E402

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
GIB = 1 << 30


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", metavar="PATH", type=Path, required=True, help="Hugging Face directory or config.json"
    )
    parser.add_argument("--train", metavar="tp=..,pp=..,ep=..", required=True, help="layout of training")
    parser.add_argument("--rollout", metavar="tp=..", required=True, help="layout of a generation replica")
    parser.add_argument("--world-size", metavar="RANKS", type=_positive, required=True)
    parser.add_argument("--ranks-per-node", metavar="RANKS", type=_positive, default=8)
    parser.add_argument("--dtype", choices=ITEMSIZES, default="bfloat16", help="of the weights (bfloat16)")
    parser.add_argument(
        "--buffer-mib", metavar="MIB", type=_positive, default=512, help="refit.buffer_mib of the run (512)"
    )
    speed = dict(metavar="GBIT", type=float)
    parser.add_argument(
        "--nvlink-gbps", default=3600.0, help="Gbit/s of a rank, each way, within a node (3600)", **speed
    )
    parser.add_argument(
        "--nic-gbps", default=400.0, help="Gbit/s of a rank, each way, between nodes (400)", **speed
    )
    args = parser.parse_args(argv)
    try:
        survey = survey_of(args)
    except (OSError, ValueError) as error:
        sys.exit(f"plan_refit: {error}")
    print(
        report(
            survey,
            nvlink_gbps=args.nvlink_gbps,
            nic_gbps=args.nic_gbps,
            one_node=args.world_size <= args.ranks_per_node,
        )
    )


def survey_of(args: argparse.Namespace) -> Survey:
    """What the command line asks for. Raises ValueError for layouts that a run would refuse, and OSError."""
    hf = json.loads((args.model / "config.json" if args.model.is_dir() else args.model).read_text())
    if not hf.get("architectures") or not hf.get("num_hidden_layers"):
        raise ValueError(
            f"{args.model} is no config.json of a language model: it lacks architectures or num_hidden_layers."
        )
    weights, num_layers, world = architecture(hf).weights(hf), hf["num_hidden_layers"], args.world_size
    train = _layout("--train", args.train, {"tp", "pp", "ep", "etp"})
    rollout = _layout("--rollout", args.rollout, {"tp", "pp"})
    config = Config(training=Training(**train), rollout=Rollout(tp=rollout.get("tp", 1)))
    check_training_grid(config, world, hf)
    check_rollout_grid(config, world, hf)
    training, experts = config.training, count_experts(weights)
    return survey_refit(
        weights,
        TrainingPlacement(
            world,
            training.tp,
            training.pp,
            num_layers,
            ep=training.ep,
            etp=training.expert_tp if experts else None,
            num_experts=experts,
        ),
        RolloutPlacement(world, config.rollout.tp, num_layers, pp=rollout.get("pp", 1)),
        ranks_per_node=args.ranks_per_node,
        itemsize=ITEMSIZES[args.dtype],
        buffer_bytes=args.buffer_mib << 20,
    )


def _layout(option: str, text: str, known: set[str]) -> dict[str, int]:
    given = dict(part.split("=", 1) if "=" in part else (part, "") for part in text.split(","))
    for name, value in given.items():
        if name not in known or not (value.isdigit() and int(value) > 0):
            raise ValueError(
                f"{option} {text}: found {name}={value}, but it takes {', '.join(sorted(known))}, e.g. tp=8,pp=2."
            )
    return {name: int(value) for name, value in given.items()}


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return int(text)


def report(survey: Survey, *, nvlink_gbps: float, nic_gbps: float, one_node: bool) -> str:
    """The table and the estimates."""
    received = survey.near_in + survey.far_in
    rows = {
        "stays on the rank": survey.stays,
        "received within the node": survey.near_in,
        "received from other nodes": survey.far_in,
        "received": received,
        "least possible": survey.lower_bound,
        "sent within the node": survey.near_out,
        "sent to other nodes": survey.far_out,
        "gathering every weight": survey.gather,
        "largest batch": survey.peak_buffer,
    }
    lines = [f"{'GiB':<28}{'min':>10}{'mean':>10}{'max':>10}{'all ranks':>12}"]
    for name, values in rows.items():
        total = "" if name == "largest batch" else f"{values.sum() / GIB:.2f}"
        lines.append(
            f"{name:<28}{values.min() / GIB:>10.3f}{values.mean() / GIB:>10.3f}{values.max() / GIB:>10.3f}{total:>12}"
        )

    def seconds(load: np.ndarray) -> float:
        """Of the busiest rank; links work both ways and beside each other."""
        near, far = load[[NEAR_IN, NEAR_OUT]].max(), load[[FAR_IN, FAR_OUT]].max()
        return 8e-9 * max(near / nvlink_gbps, far / nic_gbps)

    whole = np.stack([survey.stays, survey.near_in, survey.far_in, survey.near_out, survey.far_out])
    slowest = 8e-9 * survey.gather.max() / (nvlink_gbps if one_node else nic_gbps)
    lines += [
        "",
        f"batches                     {len(survey.batches)}",
        f"seconds, busiest rank       {seconds(whole):.2f}",
        f"seconds, batch by batch     {sum(map(seconds, survey.batches)):.2f}",
        f"seconds, gathering          {slowest:.2f}",
        f"gathering / received        {survey.gather.sum() / received.sum():.1f}"
        if received.any()
        else "nothing crosses ranks",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
