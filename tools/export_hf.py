"""Convert the policy of a run's checkpoint to a Hugging Face checkpoint for transformers and vLLM.

    lockstep export runs/grpo --out models/grpo-step-100 --step 100
    torchrun --nproc-per-node 8 -m lockstep export runs/grpo --out models/grpo --tp 8

Takes the newest checkpoint unless --step names one. The layout and number of ranks may differ from the run's,
so a model that is too large for one process can be split over several. For a run with adapters it writes the
merged weights, or with --adapter the adapters alone. A run with `checkpoint.export_hf=true` writes the same
files at its end. Each written tensor is compared with the model's, and log-probs that transformers computes
from the files with the policy's.
"""

import argparse
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser
from rl.run_directory.status import refuse_missing
from rl.runtime.ranks import Ranks, discover
from train_rl import prepare_environment


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="directory of the run")
    add("--out", required=True, help="directory to write; must not exist")
    add("--step", type=int, help="step of the checkpoint (default: the newest)")
    add("--tp", type=int, default=1, help="tensor parallel size")
    add("--pp", type=int, default=1, help="pipeline parallel size")
    add("--adapter", action="store_true", help="write only the adapters of the run, in the format of peft")
    args = parser.parse_args(argv)
    ranks = discover()
    prepare_environment(ranks)
    try:
        export(ranks, args)
    except ValueError as error:
        if ranks.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def export(ranks: Ranks, args: argparse.Namespace) -> None:
    """Export a checkpoint. Raises ValueError for wrong arguments. Collective over the world."""
    saved_at = check_paths(args)  # before the imports, which take long
    from rl.checkpoint.directory import CONFIG
    from rl.config import wing
    from rl.config.exclusions import check_exclusions
    from rl.config.features import CLASS, is_on
    from rl.config.options import load
    from rl.config.run_models import run_models
    from rl.config.schema import Config, Training
    from rl.models import by_class, read_hf_config, rope
    from rl.runtime.session import session

    with session(ranks) as device:  # silences the warnings of the imports below
        from rl.checkpoint.hf import export_hf
        from rl.checkpoint.store import CheckpointStore
        from rl.checks.model_files import wrong_export
        from rl.engines.training_parts import training_parts
        from rl.training.engine import TrainingEngine
        from rl.training.grid import build_grid
        from rl.training.spec import ModelSpec

        config = load(Config, Path(args.run_dir, "config.yaml"))
        config = replace(config, run=replace(config.run, dir=args.run_dir))  # it may have moved
        store = CheckpointStore(config)
        saved = store.named(saved_at)
        # Not the config of the first start, because a resume may have changed the model's path or its
        # scaling.
        config = replace(load(Config, saved.path / CONFIG), run=config.run)
        wing.check_wing(config)
        if args.adapter and not config.adapter.is_on:
            raise ValueError(f"--adapter: {args.run_dir} trained all weights; leave it out.")
        grid = build_grid(tp=args.tp, pp=args.pp, seed=config.run.seed)
        hf = rope.scaled(read_hf_config(config.model.path), config.model.rope_scaling)
        training = Training(tp=args.tp, pp=args.pp, mtp=config.training.mtp)
        adapter = replace(config.adapter, path="")  # the checkpoint has its values
        config = replace(config, training=training, adapter=adapter)
        check_exclusions(config, [CLASS])
        hf = by_class.described(hf) if is_on(config, CLASS) else hf
        spec = ModelSpec(config.model.path, hf, config.model.dtype)
        parts = training_parts(config, run_models(config)["policy"])
        policy = TrainingEngine(spec, training, grid, device, parts)
        store.load_weights(saved, {"policy": policy} | policy.parts.models())
        if args.adapter:
            export_adapter = wing.door_of("adapters", "export", needed_by="--adapter")
            export_adapter(policy, config.model.path, args.out)
        else:
            export_hf(policy, config.model.path, args.out, check=partial(wrong_export, policy))
        if ranks.rank == 0:
            kind = "the adapters" if args.adapter else "a Hugging Face checkpoint"
            print(f"wrote {args.out}, {kind} of step {saved.step}")


def check_paths(args: argparse.Namespace) -> str:
    """Return the checkpoint or run directory to export, without importing torch. Raises ValueError for wrong
    arguments."""
    if Path(args.out).exists():
        raise ValueError(f"--out {args.out} exists already: name another directory.")
    refuse_missing(args.run_dir)
    found = complete_checkpoints(Path(args.run_dir, "checkpoints"), args.step)
    return str(args.run_dir if args.step is None else found[args.step])


def complete_checkpoints(directory: Path, step: int | None) -> dict[int, Path]:
    """Return the complete checkpoints by step. Raises ValueError if there is none, or none of `step`."""
    # rl.checkpoint.directory has these names, too, but imports torch.
    manifests = sorted(directory.glob("step_*/checkpoint.json"))
    names = ((re.fullmatch(r"step_(\d+)", path.parent.name), path.parent) for path in manifests)
    found = {int(match[1]): path for match, path in names if match}
    if not found or step is not None and step not in found:
        asked = "" if step is None else f" of step {step}"
        steps = ", ".join(f"step {step}" for step in found)
        train = "train until one is saved (checkpoint.every, or the end of the run)"
        remedy = f"use --step with one of {steps}" if found else train
        raise ValueError(f"{directory} has no complete checkpoint{asked}; {remedy}.")
    return found


if __name__ == "__main__":
    sys.exit(main())
