"""Turn the command line or YAML of a verl run into a config of this project.

    lockstep convert run_qwen3-8b.sh --train-rows 7473 --out my.yaml
    lockstep convert ppo.yaml actor_rollout_ref.actor.optim.lr=2e-6
    lockstep train --config my.yaml --dry-run --world-size 8

Writes the config, with the settings that differ from this project's defaults; settings that the verl run
leaves at verl's defaults are translated too. Then lists on stderr, with the reason, each setting that has no
counterpart, and each one that needs none. If the dry run estimates that the layout does not fit the script's
GPUs, the tool changes the layout, but nothing that affects learning.

A .sh file is executed by bash, so that its variables, arithmetic and $@ have their values. Its PATH has no
programs but python, torchrun, uv and ray, which only report their arguments. Redirections and programs named
by their whole path still work, so pass only scripts that you trust. Names of settings are from verl 0.7
(commit b178a3cd, January 2026) and from August 2026 (1dda039b9), defaults from the former; tools/verl/ has
the tables.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser
from tools.verl.convert import convert
from tools.verl.every import convert_every


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "file",
        metavar="FILE",
        help="verl's script (.sh) or its config (.yaml); with --all a checkout of verl",
    )
    add("overrides", metavar="key=value", nargs="*", help="further settings of verl, as after the script")
    add("--out", metavar="FILE", help="file to write (default: standard output), or folder with --all")
    add("--train-rows", metavar="N", type=int, default=0, help="rows of the training data, for total_epochs")
    add("--model-shape", metavar="FILE", default="", help="config.json of a model that is not here")
    add("--gpu-memory-gib", metavar="X", type=float, default=80.0, help="memory of a GPU (80)")
    add("--all", action="store_true", help="convert every script of a checkout, and count those that pass")
    args = parser.parse_intermixed_args(argv)
    known = dict(train_rows=args.train_rows, gpu_memory_gib=args.gpu_memory_gib)
    try:
        if args.all:
            return print_all(Path(args.file), args.out, **known)
        found = convert(Path(args.file), args.overrides, shape=args.model_shape, **known)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.out:
        Path(args.out).write_text(found.text)
    else:
        print(found.text, end="")
    print(found.report, file=sys.stderr)
    return 0


def print_all(checkout: Path, out: str | None, **known: Any) -> int:
    """Print what became of every example script, and the counts; keep the configs if `out` is given."""
    with tempfile.TemporaryDirectory() as unkept:
        outcomes = convert_every(checkout, Path(out or unkept), **known)
    passed = sum(not outcome.refusal for outcome in outcomes)
    for outcome in outcomes:
        print(f"{outcome.script}: {outcome.refusal or f'{outcome.world_size} GPUs'}")
    print(f"{passed} of {len(outcomes)} scripts give a config that passes the dry run on their GPUs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
