"""Seconds for which a checkpoint blocks training, saved in the foreground and in the background.

A random model with an initialised optimizer is saved several times each way. Training is blocked for the
duration of `store.save` and, for a background save, of the commit after all ranks have written. The first
background save also allocates the host memory.
"""

import shutil
import time
from argparse import Namespace
from pathlib import Path

from tools.bench_tables.report import Row, middle
from tools.bench_tables.sides import BenchFailed, on_ranks


def add_arguments(add) -> None:
    add(
        "--disk",
        type=Path,
        metavar="DIR",
        help="a new directory on the disk of your runs, removed at the end (WORK)",
    )
    add("--layers", type=int, default=10)
    add("--hidden", type=int, default=1024)
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="dtype of the weights")
    add("--tp", type=int, default=1)
    add("--ranks", type=int, default=2)
    add("--step-seconds", type=float, default=1.0, help="duration of a training step between two polls")
    add("--rounds", type=int, default=5, help="saves of each kind, at least 2 (5)")


def measure(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return the row of foreground and background saves."""
    if args.rounds < 2:
        raise BenchFailed(
            f"--rounds={args.rounds} must be at least 2: the first background save is not counted."
        )
    disk = args.disk or runs / "disk"
    disk.mkdir(parents=True)
    try:
        model = save_model(disk / "model", args.hidden, args.layers)
        asked = {key: getattr(args, key) for key in ("dtype", "tp", "step_seconds", "rounds")}
        found = on_ranks(
            "checkpoint:save_both_ways",
            args.ranks,
            runs / "ranks",
            model=str(model),
            run_dir=str(disk / "run"),
            **asked,
        )
    finally:
        shutil.rmtree(disk)
    rounds = {kind: found[kind] for kind in ("foreground", "background")}
    foreground, first, *later = rounds["foreground"], *rounds["background"]
    columns = {
        "foreground, s": middle(foreground),
        "first in background, s": first,
        "later in background, s": middle(later),
        "GiB": found["bytes"] / 2**30,
    }
    name = f"{args.layers} layers of {args.hidden}, {args.ranks} ranks, tp {args.tp}"
    return [Row(name, columns, middle(later) / middle(foreground), rounds)], {}


def save_model(directory: Path, hidden: int, layers: int) -> Path:
    """Write a random Qwen2 in bfloat16, with a tokenizer."""
    import torch
    import transformers

    from tools.make_toy import build_tokenizer

    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen2Config(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


def save_both_ways(
    device, *, model: str, run_dir: str, dtype: str, tp: int, step_seconds: float, rounds: int
) -> dict:
    """Return the seconds for which each save blocked training, by kind. Collective over the world."""
    import torch.distributed as dist

    from rl.checkpoint.store import CheckpointStore
    from rl.config.schema import Checkpoint, Config, Model, Run, Training
    from rl.engines.engines import build_policy
    from rl.models import read_hf_config
    from rl.training.grid import build_grid
    from rl.training.optimizer import optimizer_parts

    config = Config(model=Model(path=model, dtype=dtype), training=Training(tp=tp))
    policy = build_policy(config, read_hf_config(model), build_grid(tp=tp, pp=1, seed=0), device)
    for optimizer in optimizer_parts(policy.optimizer):
        optimizer._init_optimizer_states_with_dummy_values()
    seconds: dict[str, list[float]] = {"foreground": [], "background": []}
    step = 0
    for kind, blocked in seconds.items():
        checkpoint = Checkpoint(background=kind == "background", keep_last=1)
        store = CheckpointStore(Config(run=Run(dir=run_dir), checkpoint=checkpoint))
        for _ in range(rounds):
            step += 1
            dist.barrier()
            start = time.perf_counter()
            store.save(step, {"policy": policy}, {})
            stall = time.perf_counter() - start
            while store.is_saving:
                time.sleep(step_seconds)
                start = time.perf_counter()
                store.poll()
                stall += time.perf_counter() - start
            blocked.append(stall)
        store.close()
    dist.barrier()
    files = [path for path in (Path(run_dir) / "checkpoints").rglob("*") if path.is_file()]
    return seconds | {"bytes": sum(path.stat().st_size for path in files)}
