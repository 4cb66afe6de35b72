"""A refit by plan against a refit by gathering: bytes received from the transport, and seconds.

A random Qwen2 is held by Megatron at TP x PP and served by vLLM. Each round does both refits; the first round
is not counted: it also connects the ranks and computes the plan. At the end, the engine's parameters are
compared bitwise.
"""

import math
import time
from argparse import Namespace
from pathlib import Path

from tools.bench_tables.report import Row, middle
from tools.bench_tables.sides import BenchFailed, on_ranks

SIZES = dict(
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=512,
)
MIB = 1 << 20


def add_arguments(add) -> None:
    add("--train", metavar="TPxPP", default="2x2", help="training layout (2x2)")
    add("--rollout-tp", metavar="TP", type=int, default=2, help="ranks of a generation replica (2)")
    add("--ranks", type=int, default=4, help="processes on this host (4)")
    add("--rounds", type=int, default=5, help="counted rounds (5)")
    add("--buffer-mib", type=int, default=512, help="refit.buffer_mib (512)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--layers", type=int, default=SIZES["num_hidden_layers"], help="layers of the model (12)")


def measure(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return the row of the two refits. Raises BenchFailed if they leave different parameters."""
    model = save_model(runs / "model", args.dtype, num_hidden_layers=args.layers)
    asked = {key: getattr(args, key) for key in ("train", "rollout_tp", "rounds", "buffer_mib", "dtype")}
    found = on_ranks("refit:refit_both_ways", args.ranks, runs / "ranks", model=str(model), **asked)
    if found["differing"]:
        raise BenchFailed(f"parameters differ between the two refits: {', '.join(found['differing'])}.")
    columns: dict[str, float | int | str] = {}
    for way, seconds in found["seconds"].items():
        columns[f"{way}, s"] = middle(seconds)
        columns[f"{way}, MiB received"] = found["bytes"][way] / MIB
    layouts = f"training {args.train} -> rollout TP {args.rollout_tp}, {args.ranks} ranks"
    ratio = middle(found["seconds"]["gather"]) / middle(found["seconds"]["plan"])
    name = f"{found['parameters'] / 1e6:.0f} M parameters, {args.dtype}, {layouts}"
    return [Row(name, columns, ratio, found["seconds"])], {}


def save_model(directory: Path, dtype: str, **sizes: int) -> Path:
    """Write a random Qwen2 of SIZES, updated by `sizes`, with a tokenizer, which vLLM requires."""
    import torch
    import transformers

    from tools.make_toy import build_tokenizer

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES | sizes)
    transformers.Qwen2ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


def refit_both_ways(
    device, *, model: str, train: str, rollout_tp: int, rounds: int, buffer_mib: int, dtype: str
) -> dict:
    """Return seconds and bytes of both refits, and the parameters that differ. Collective over the world."""
    import torch

    from rl.refit.refit import check_refit, refit
    from rl.runtime.collectives import gather_objects

    trainer, engine = build(model, train, rollout_tp, dtype, device)
    count = CountedBytes()
    ways = {
        "plan": lambda: refit(trainer, engine, buffer_mib=buffer_mib),
        "gather": lambda: gather_and_load(trainer, engine),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    num_bytes, contents = {}, {}
    with torch.no_grad():
        for turn in range(1 + rounds):
            for name, way in ways.items():
                for parameter in engine.weights().values():
                    parameter.data.fill_(float("nan"))
                count.received = 0
                elapsed = timed(way, device)
                if turn > 0:
                    seconds[name].append(elapsed)
                num_bytes[name] = count.received
                contents[name] = {
                    key: parameter.detach().clone() for key, parameter in engine.weights().items()
                }
        differing = [
            key
            for key, tensor in contents["plan"].items()
            if not torch.equal(tensor, contents["gather"][key])
        ]
        check_refit(trainer, engine, buffer_mib=buffer_mib)
    everyone = gather_objects((num_bytes, differing))
    return {
        "seconds": seconds,
        "bytes": {name: sum(counted[name] for counted, _ in everyone) for name in ways},
        "differing": sorted({name for _, names in everyone for name in names}),
        "parameters": sum(
            math.prod(shape) for weight in trainer.weight_map.weights for shape in weight.shapes
        ),
    }


def gather_and_load(trainer, engine) -> None:
    """Gather every weight on every rank and let vLLM load its shard. Collective over the world."""
    engine.model.load_weights(trainer.full_weights())
    engine.weights_changed()


def build(model: str, train: str, rollout_tp: int, dtype: str, device):
    """Return the two engines of the benchmark."""
    from rl.config.schema import Rollout, Training
    from rl.models import read_hf_config
    from rl.rollout.engine import RolloutEngine
    from rl.training.engine import TrainingEngine
    from rl.training.grid import build_grid
    from rl.training.spec import ModelSpec

    tp, pp = map(int, train.split("x"))
    spec, grid = ModelSpec(model, read_hf_config(model), dtype), build_grid(tp=tp, pp=pp, seed=1)
    trainer = TrainingEngine(spec, Training(tp=tp, pp=pp), grid, device)
    rollout = Rollout(tp=rollout_tp, max_response_tokens=64, max_concurrent_samples=4, cpu_kv_cache_mib=16)
    return trainer, RolloutEngine(model, rollout, dtype=dtype, max_tokens=128, seed=1, device=device)


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
