"""A verl run as the text of a config of this project, and a report of what was not translated."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl.config.options import Dumper, flatten
from rl.config.schema import load_config
from tools.verl.fit import fitted
from tools.verl.keys import MISSING, NOT_NEEDED, reason
from tools.verl.script import VerlSettings, read_settings
from tools.verl.translate import translate


@dataclass(frozen=True)
class Converted:
    """A config made from a verl run."""

    text: str
    """YAML."""
    report: str
    """Notes, then the settings that were not translated."""
    world_size: int
    """Number of GPUs of the verl run."""


def convert(
    file: Path, overrides: Sequence[str] = (), *, train_rows: int, gpu_memory_gib: float, shape: str = ""
) -> Converted:
    """Return the config for a verl script or YAML.

    overrides: further settings of verl. train_rows: rows of the training data; 0 if unknown. gpu_memory_gib:
    memory of a GPU in GiB. shape: config.json of a model that is not here. Raises ValueError, with what would
    be needed, if this project cannot do the run, OSError if the file cannot be read.
    """
    given, assumed = read_settings(file, overrides)
    settings = VerlSettings(given)
    ours, notes = translate(settings, train_rows)
    world_size = settings.get("trainer.nnodes", 1) * settings.get("trainer.n_gpus_per_node", 8)
    changes, more = fitted(only_changes(ours), world_size, shape=shape, gpu_memory_gib=gpu_memory_gib)
    ours |= changes
    tree = yaml.dump(only_changes(ours), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    text = f"# From {file.name} by `lockstep convert`.\n{tree}"
    return Converted(text, report(settings.rest(), [*assumed, *notes, *more]), world_size)


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
