"""How long training stands still for a checkpoint, written in the foreground and in the background.

    torchrun --nproc-per-node 2 tools/bench_checkpoint.py --out /path/on/the/disk/of/your/runs

Builds a random model of about 200 M parameters (--layers, --hidden) with an optimizer that has made a step, saves it --saves
times each way and prints the seconds of each: the stall is what `store.save` takes, for a background save with the commit, once
all ranks have written. The first background save also allocates the host memory; later ones use it again.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

# Run as a script, python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.runtime.ranks import discover  # noqa: E402
from train_rl import leave, prepare_environment  # noqa: E402


def make_model(directory: Path, layers: int, hidden: int) -> str:
    """A random Qwen2 of that size; returns the directory."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=32000,
        tie_word_embeddings=True,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=256,
        dtype="bfloat16",
    )
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return str(directory)


def measure(args: argparse.Namespace, ranks) -> None:
    import torch.distributed as dist

    from rl.checkpoint.store import CheckpointStore
    from rl.config.schema import Checkpoint, Config, Model, Run, Training
    from rl.engines.engines import build_policy
    from rl.models import read_hf_config
    from rl.runtime.session import session
    from rl.training.grid import build_grid
    from rl.training.optimizer import optimizer_parts

    out = Path(args.out)
    with session(ranks) as device:
        if ranks.rank == 0:
            make_model(out / "model", args.layers, args.hidden)
        dist.barrier()
        config = Config(model=Model(path=str(out / "model"), dtype=args.dtype), training=Training(tp=args.tp))
        policy = build_policy(
            config, read_hf_config(config.model.path), build_grid(tp=args.tp, pp=1, seed=0), device
        )
        for optimizer in optimizer_parts(policy.optimizer):
            optimizer._init_optimizer_states_with_dummy_values()
        say = print if ranks.rank == 0 else (lambda *_: None)
        seconds: dict[bool, list[float]] = {}
        for background in (False, True):
            run = Run(dir=str(out / "run"))
            store = CheckpointStore(
                Config(run=run, checkpoint=Checkpoint(background=background, keep_last=1))
            )
            for step in range(args.saves):
                dist.barrier()
                start = time.perf_counter()
                store.save(1 + step + background * args.saves, {"policy": policy}, {})
                stall = copied = time.perf_counter() - start
                while store.is_saving:
                    time.sleep(args.step_seconds)
                    start = time.perf_counter()
                    store.poll()
                    stall += time.perf_counter() - start
                seconds.setdefault(background, []).append(stall)
                way = "background" if background else "foreground"
                say(f"{way}: training stood still for {stall:.3f} s (save {copied:.3f} s)")
            store.close()
        files = [path for path in (out / "run" / "checkpoints").rglob("*") if path.is_file()]
        say(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 2**30:.3f} GiB")
        foreground, later = statistics.median(seconds[False]), statistics.median(seconds[True][1:])
        found = {
            "foreground_s": foreground,
            "background_first_s": seconds[True][0],
            "background_later_s": later,
        }
        say(json.dumps(found | {"ratio": later / foreground}))
        dist.barrier()
        if ranks.rank == 0:
            shutil.rmtree(out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="directory to use; must not exist; removed at the end")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the weights")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=1.0,
        help="of a training step, at whose end ranks ask each other",
    )
    parser.add_argument("--saves", type=int, default=4, help="of each kind; two or more")
    args = parser.parse_args()
    ranks = discover()
    prepare_environment(ranks)
    if ranks.rank == 0:
        Path(args.out).mkdir(parents=True)
    measure(args, ranks)
    return 0


if __name__ == "__main__":
    leave(main())
