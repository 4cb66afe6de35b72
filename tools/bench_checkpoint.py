"""Measure how long a checkpoint blocks training, saved in the foreground and in the background.

    torchrun --nproc-per-node 2 tools/bench_checkpoint.py --out /path/on/the/disk/of/your/runs

Builds a random model of about 200 M parameters (--layers, --hidden) with an initialised optimizer, saves it
--saves times each way and prints the seconds that training is blocked: the duration of `store.save` and, for
a background save, of the commit after all ranks have written. The first background save also allocates the
host memory.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

# Python searches only tools/ for modules when it runs this file as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.runtime.ranks import discover  # noqa: E402
from tools.bench_refit import save_model  # noqa: E402
from train_rl import leave, prepare_environment  # noqa: E402


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
            heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), args.hidden // 64)
            sizes = {"hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, **heads}
            layers = {"num_hidden_layers": args.layers, "tie_word_embeddings": True}
            save_model(out / "model", "bfloat16", **sizes, **layers)
        dist.barrier()
        config = Config(model=Model(path=str(out / "model"), dtype=args.dtype), training=Training(tp=args.tp))
        policy = build_policy(
            config, read_hf_config(config.model.path), build_grid(tp=args.tp, pp=1, seed=0), device
        )
        for optimizer in optimizer_parts(policy.optimizer):
            optimizer._init_optimizer_states_with_dummy_values()
        report = print if ranks.rank == 0 else (lambda *_: None)
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
                report(f"{way}: training was blocked for {stall:.3f} s (save {copied:.3f} s)")
            store.close()
        files = [path for path in (out / "run" / "checkpoints").rglob("*") if path.is_file()]
        report(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 2**30:.3f} GiB")
        foreground, later = statistics.median(seconds[False]), statistics.median(seconds[True][1:])
        found = {
            "foreground_s": foreground,
            "background_first_s": seconds[True][0],
            "background_later_s": later,
        }
        report(json.dumps(found | {"ratio": later / foreground}))
        dist.barrier()
        if ranks.rank == 0:
            shutil.rmtree(out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, help="directory to use; must not exist; removed at the end")
    add("--layers", type=int, default=10)
    add("--hidden", type=int, default=1024)
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="dtype of the weights")
    add("--tp", type=int, default=1)
    add("--step-seconds", type=float, default=1.0, help="duration of a training step between two polls")
    add("--saves", type=int, default=4, help="saves of each kind, at least 2")
    args = parser.parse_args()
    ranks = discover()
    prepare_environment(ranks)
    if ranks.rank == 0:
        Path(args.out).mkdir(parents=True)
    measure(args, ranks)
    return 0


if __name__ == "__main__":
    leave(main())
