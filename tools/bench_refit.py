"""Compare a refit by plan with a refit by gathering: bytes received from the transport, and seconds.

    python tools/bench_refit.py                                       4 ranks on this host, about 2 minutes
    python tools/bench_refit.py --train 4x1 --rollout-tp 1 --rounds 9

A random Qwen2 of about 150 M parameters is held by Megatron at TP x PP and served by vLLM. Each round does
both refits; the first round is not counted (connections, the plan). At the end, the engine's parameters are
compared bitwise.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Python searches only tools/ for modules when it runs this file as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SIZES = dict(
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=512,
)
CHECKPOINT = "BENCH_REFIT_CHECKPOINT"
"""Environment variable with the model's directory; it is set only in the ranks."""
MIB = 1 << 20


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--train", metavar="TPxPP", default="2x2", help="training layout (2x2)")
    add("--rollout-tp", metavar="TP", type=int, default=2, help="ranks of a generation replica (2)")
    add("--ranks", type=int, default=4, help="processes on this host (4)")
    add("--rounds", type=int, default=5, help="counted rounds (5)")
    add("--buffer-mib", type=int, default=512, help="refit.buffer_mib (512)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--layers", type=int, default=SIZES["num_hidden_layers"], help="layers of the model (12)")
    args = parser.parse_args(argv)
    if CHECKPOINT in os.environ:
        run_rank(args, os.environ[CHECKPOINT])
        return
    with tempfile.TemporaryDirectory(prefix="bench-refit-") as directory:
        save_model(directory, args.dtype, num_hidden_layers=args.layers)
        torchrun = "-m torch.distributed.run --standalone --nproc-per-node".split()
        command = [sys.executable, *torchrun, str(args.ranks)]
        environ = {"OMP_NUM_THREADS": "1"} | os.environ | {CHECKPOINT: directory}
        arguments = sys.argv[1:] if argv is None else argv
        sys.exit(subprocess.run([*command, __file__, *arguments], env=environ).returncode)


def save_model(directory: str | Path, dtype: str, **sizes: int) -> None:
    """Write a random Qwen2 of SIZES, updated by `sizes`, with a tokenizer, which vLLM requires."""
    import torch
    import transformers

    from tools.make_toy import build_tokenizer

    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES | sizes)
    transformers.Qwen2ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


def run_rank(args: argparse.Namespace, checkpoint: str) -> None:
    """Run one rank of the benchmark. Collective over the world."""
    from rl.runtime.ranks import discover
    from train_rl import prepare_environment

    ranks = discover()
    prepare_environment(ranks)
    import torch

    from rl.refit.refit import check_refit, refit
    from rl.runtime.session import session

    with session(ranks) as device, torch.no_grad():
        trainer, engine = build(args, checkpoint, device)
        count = CountedBytes()
        ways = {
            "plan": lambda: refit(trainer, engine, buffer_mib=args.buffer_mib),
            "gather": lambda: gather_and_load(trainer, engine),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        num_bytes, contents = {}, {}
        for _ in range(1 + args.rounds):
            for name, way in ways.items():
                for parameter in engine.weights().values():
                    parameter.data.fill_(float("nan"))
                count.received = 0
                seconds[name].append(timed(way, device))
                num_bytes[name] = count.received
                contents[name] = {
                    key: parameter.detach().clone() for key, parameter in engine.weights().items()
                }
        differing = [
            key
            for key, tensor in contents["plan"].items()
            if not torch.equal(tensor, contents["gather"][key])
        ]
        check_refit(trainer, engine, buffer_mib=args.buffer_mib)
        print_results(args, trainer, seconds, num_bytes, differing, ranks.rank)


def gather_and_load(trainer, engine) -> None:
    """Gather every weight on every rank and let vLLM load its shard. Collective over the world."""
    engine.model.load_weights(trainer.full_weights())
    engine.weights_changed()


def build(args: argparse.Namespace, checkpoint: str, device):
    """Return the two engines of the benchmark."""
    from rl.config.schema import Rollout, Training
    from rl.models import read_hf_config
    from rl.rollout.engine import RolloutEngine
    from rl.training.engine import TrainingEngine
    from rl.training.grid import build_grid

    tp, pp = map(int, args.train.split("x"))
    trainer = TrainingEngine(
        checkpoint,
        read_hf_config(checkpoint),
        training=Training(tp=tp, pp=pp),
        dtype=args.dtype,
        grid=build_grid(tp=tp, pp=pp, seed=1),
        device=device,
    )
    rollout = Rollout(
        tp=args.rollout_tp, max_response_tokens=64, max_concurrent_samples=4, cpu_kv_cache_mib=16
    )
    return trainer, RolloutEngine(
        checkpoint, rollout, dtype=args.dtype, max_tokens=128, seed=1, device=device
    )


class CountedBytes:
    """Counts the bytes that this rank receives from torch.distributed, by the calls that both refits make."""

    def __init__(self):
        import torch.distributed as dist

        self.received = 0
        all_gather, broadcast = dist.all_gather_into_tensor, dist.broadcast
        send_and_receive = dist.batch_isend_irecv

        def counted_all_gather(output, mine, **options):
            self.received += output.nbytes - mine.nbytes
            return all_gather(output, mine, **options)

        def counted_broadcast(tensor, **options):
            if dist.get_rank(options["group"]) != options["group_src"]:
                self.received += tensor.nbytes
            return broadcast(tensor, **options)

        def counted_messages(operations):
            self.received += sum(o.tensor.nbytes for o in operations if o.op is dist.irecv)
            return send_and_receive(operations)

        dist.all_gather_into_tensor, dist.broadcast = counted_all_gather, counted_broadcast
        dist.batch_isend_irecv = counted_messages


def timed(way, device) -> float:
    """Return the seconds until every rank has finished `way`."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    way()
    device.synchronize()
    dist.barrier()
    return time.perf_counter() - start


def print_results(args, trainer, seconds, num_bytes, differing, rank) -> None:
    """Print the table on rank 0; exit with 1 if the two refits differ. Collective over the world."""
    from rl.runtime.collectives import gather_objects

    everyone = gather_objects((num_bytes, differing))
    wrong = sorted({name for _, names in everyone for name in names})
    if rank == 0:
        size = sum(math.prod(shape) for weight in trainer.weight_map.weights for shape in weight.shapes) / 1e6
        layouts = f"training {args.train} -> rollout TP {args.rollout_tp}, {len(everyone)} ranks"
        print(f"{size:.0f} M parameters, {args.dtype}, {layouts}")
        print(f"{'':<10}{'MiB received':>14}{'most of a rank':>16}{'seconds':>10}{'least':>8}{'most':>8}")
        medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        totals = {name: sum(counted[name] for counted, _ in everyone) for name in seconds}
        for name, values in seconds.items():
            most = max(counted[name] for counted, _ in everyone)
            times = f"{medians[name]:>10.3f}{min(values[1:]):>8.3f}{max(values[1:]):>8.3f}"
            print(f"{name:<10}{totals[name] / MIB:>14.1f}{most / MIB:>16.1f}{times}")
        traffic = f"{totals['gather'] / totals['plan']:.2f} times less" if totals["plan"] else "no"
        print(f"plan: {traffic} traffic, {medians['gather'] / medians['plan']:.1f} times less time")
        print(f"parameters that differ between the two: {', '.join(wrong) or 'none'}", flush=True)
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
