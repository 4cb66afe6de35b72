"""Turn the command line or YAML of a verl run into a config of this project.

    python tools/from_verl.py run_qwen3-8b.sh --train-rows 7473 --out my.yaml
    python tools/from_verl.py ppo.yaml actor_rollout_ref.actor.optim.lr=2e-6
    python train_rl.py --config my.yaml --dry-run --world-size 8

Writes the config, with the settings in which it differs from this project's defaults; settings that the verl
run leaves at verl's defaults are translated too. Then lists on stderr, with the reason, each setting that has
no counterpart, and each one that needs none. A layout that does not fit the script's number of GPUs by the
estimate of the dry run is changed, which changes nothing that is learned.

A .sh file is executed by bash, so that its variables, arithmetic and $@ have their values. Its PATH has no
programs but python, torchrun, uv and ray, which only report their arguments. Redirections and programs named
by their whole path still work, so pass only scripts that you trust. Names of settings are those of verl 0.7
(commit b178a3cd, January 2026) and of August 2026 (1dda039b9), defaults those of the former; tools/verl/ has
the tables.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

# Python searches only tools/ for modules when it runs this file as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml  # noqa: E402

from rl.config.options import Dumper, flatten  # noqa: E402
from rl.config.schema import load_config  # noqa: E402
from tools.verl.fit import fitted  # noqa: E402
from tools.verl.keys import MISSING, NOT_NEEDED, reason  # noqa: E402
from tools.verl.script import Settings, read_settings  # noqa: E402
from tools.verl.translate import translate  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="verl's script (.sh) or its config (.yaml)")
    add("overrides", metavar="key=value", nargs="*", help="further settings of verl, as after the script")
    add("--out", metavar="FILE", help="file to write (default: standard output)")
    add("--train-rows", metavar="N", type=int, default=0, help="rows of the training data, for total_epochs")
    add("--model-shape", metavar="FILE", default="", help="config.json of a model that is not here")
    add("--gpu-memory-gib", metavar="X", type=float, default=80.0, help="memory of a GPU (80)")
    args = parser.parse_intermixed_args(argv)
    try:
        given, assumed = read_settings(Path(args.file), args.overrides)
        settings = Settings(given)
        ours, notes = translate(settings, args.train_rows)
        world_size = settings.get("trainer.nnodes", 1) * settings.get("trainer.n_gpus_per_node", 8)
        options = dict(shape=args.model_shape, gpu_memory_gib=args.gpu_memory_gib)
        changes, more = fitted(only_changes(ours), world_size, **options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ours |= changes
    tree = yaml.dump(only_changes(ours), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    text = f"# From {Path(args.file).name} by tools/from_verl.py.\n{tree}"
    if args.out:
        Path(args.out).write_text(text)
    else:
        print(text, end="")
    print(report(settings.rest(), [*assumed, *notes, *more]), file=sys.stderr)
    return 0


def only_changes(ours: dict[str, Any]) -> dict[str, Any]:
    """Return the nested settings that differ from the defaults of the algorithm and of its loss."""
    chosen = [f"{key}={ours[key]}" for key in ("algorithm", "objective.loss") if ours.get(key)]
    defaults = flatten(load_config(None, chosen))
    defaults |= {"objective.loss": flatten(load_config(None, chosen[:1]))["objective.loss"]}
    tree: dict[str, Any] = {"algorithm": ours["algorithm"]}
    for key, value in ours.items():
        if value in (None, "", {}) or (key in defaults and defaults[key] == value) or key == "algorithm":
            continue
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def report(rest: dict[str, Any], notes: list[str]) -> str:
    """Return the text about settings that were not translated."""
    lines = [*notes]
    missing = {key: reason(key, MISSING) for key in rest if not reason(key, NOT_NEEDED)}
    if missing:
        lines.append("\nno counterpart:")
        lines += [f"  {key}={rest[key]}: {why or 'unknown to this tool'}" for key, why in missing.items()]
    needless: dict[str, list[str]] = {}
    for key in rest:
        if why := reason(key, NOT_NEEDED):
            needless.setdefault(why, []).append(key)
    if needless:
        lines.append("\nnot needed:")
        lines += [f"  {why}:\n    " + "\n    ".join(keys) for why, keys in needless.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
