"""Comparison of a run's config and files with the checkpoint from which the run continues.

A run must not silently continue in the directory of another run. For example, the new run would train the
other run's checkpoint with another reward, or end at once because that checkpoint is at the last step.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import yaml

from rl.config.checks import OPTIMIZERS
from rl.config.options import ConfigError, flatten, to_yaml
from rl.config.run_models import run_models
from rl.config.schema import Config
from rl.run_directory.record import own_hashes

IDENTITY = (
    "run.name",
    "algorithm",
    "model.path",
    "data.train",
    "reward.function",
    "reward.kwargs",
    "reward.sources",
    "reward.model.path",
    "reward.judge.path",
    "agents.environment",
    "agents.sources",
    "teacher.path",
    "teacher.sources",
    "critic.path",
    "implicit_reward.path",
    "data.string_prompts",
)
"""Keys that identify a run. The keys that name columns of the data (`data.*_key`) identify it too."""
UNNAMED = "run"
"""Name of a run without a config file and, in checkpoints of earlier versions, of any unnamed run."""
EXPECTED = ("run.dir", "run.max_steps", "run.max_time", "checkpoint.resume", "checkpoint.accept_changes")
"""Keys that are often changed to continue a run; their changes are not printed. A change of run.max_steps is
printed if a learning rate decays until that step."""


def changes(config: Config, saved: dict[str, Any]) -> dict[str, str]:
    """Return `old -> new` by key, for each key that differs and is not in EXPECTED.

    saved: config.yaml of the checkpoint. A key that is missing there, because it is newer, is not compared.
    """
    own, found = yaml.safe_load(to_yaml(config)), {}
    sections = [key for key in OPTIMIZERS if key.partition(".")[0] in ("training", *run_models(config))]
    decays = any(_value(own, f"{section}.schedule") != "constant" for section in sections)
    for key in flatten(config):
        before, after = _value(saved, key), _value(own, key)
        is_rate = key == "run.max_steps" and decays
        if before is not _ABSENT and before != after and (is_rate or key not in EXPECTED):
            found[key] = f"{_text(before)} -> {_text(after)}"
            found[key] += " (changes the decay of the learning rate)" if is_rate else ""
    if _value(saved, "run.name") == UNNAMED:
        found.pop("run.name", None)
    return found


def check_changes(config: Config, saved: dict[str, Any], place: str) -> None:
    """Raise ConfigError if the checkpoint in `place` has the config of another run."""
    if config.checkpoint.accept_changes:
        return
    found = changes(config, saved)
    own = {key: text for key, text in found.items() if key in IDENTITY or _is_column(key)}
    if own:
        words = ", ".join(f"{key}: {text}" for key, text in own.items())
        raise ConfigError(
            f"run.dir={config.run.dir} belongs to another run (checkpoint {place}): {words}; set "
            "another run.dir, or checkpoint.accept_changes=true to continue with these changes."
        )


def contents(config: Config, rows: Sequence[Any]) -> dict[str, str | int]:
    """Return digests of the run's files, because a file's contents may change while its path stays the same.

    rows: the training data. The digest covers token ids, so it also depends on the tokenizer and the chat
        template.
    """
    digest = 0
    for row in rows:
        for name, value in vars(row).items():
            if isinstance(value, np.ndarray):
                digest = zlib.crc32(value.tobytes(), digest)
            elif name in ("ground_truth", "label", "extra_info", "data_source"):
                digest = zlib.crc32(repr(value).encode(errors="replace"), digest)
    return own_hashes(config) | {"data.train": digest}


def _is_column(key: str) -> bool:
    return key.startswith("data.") and key.endswith("_key")


_ABSENT = object()


def _value(tree: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(tree, dict) or name not in tree:
            return _ABSENT
        tree = tree[name]
    return tree


def _text(value: Any) -> str:
    text = str(value) if value != "" else "(empty)"
    return text if len(text) <= 80 else text[:77] + "..."
