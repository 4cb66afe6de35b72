"""`~` and environment variables in the keys of a config that name files and directories.

    run.dir=~/runs/a    data.train=[$SCRATCH/train.parquet]    model.path=${MODELS}/qwen

A `~` or `~user` at the beginning, `${name}`, and `$NAME` in capitals are replaced when the config is read, on
every rank. All other characters, also another `$`, stay; `$$NAME` is a name that begins with `$`.
The arguments of a user's own code (`reward.kwargs`, `agents.kwargs`) are not changed.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

from rl.config.options import ConfigError, annotations, join

NAMES = frozenset(
    "advantage algorithm config curriculum dir environment function image interpreter loss mlflow parser "
    "path resume rollouts train val".split()
)
"""Last parts of keys that name files and directories."""
OPAQUE = frozenset({"kwargs", "template_kwargs", "roles"})
"""Sections that give these last parts of a key another meaning."""

T = TypeVar("T")


def expand_paths(section: T, prefix: str = "") -> T:
    """Replace `~` and variables in the paths of a config; return the config. Raises ConfigError."""
    for name in annotations(type(section)):  # type: ignore[arg-type]
        value, key = getattr(section, name), join(prefix, name)
        if is_dataclass(value) and name not in OPAQUE:
            expand_paths(value, key)
        else:
            setattr(section, name, _expanded(value, name, key))
    return section


def _expanded(value: Any, name: str, key: str) -> Any:
    if isinstance(value, str) and name in NAMES:
        return _expand(value, key)
    if isinstance(value, list):
        return [_expanded(each, name, key) for each in value]
    if isinstance(value, Mapping) and name not in OPAQUE:
        return {own: _expanded(each, own, join(key, own)) for own, each in value.items()}
    return value


def literal(path: object) -> str:
    """Return the text that a key needs to name this absolute path, whatever characters its name holds."""
    return re.sub(r"\$(?=[A-Z_{])", "$$", str(path))


def _expand(text: str, key: str) -> str:
    def variable(match: re.Match) -> str:
        if match[0] == "$$":
            return "$"
        found = os.environ.get(match[1] or match[2])
        if found is None:
            raise ConfigError(
                f"{key}={text}: the environment variable {match[1] or match[2]} is not set here; set it "
                "on all nodes, or write the path itself."
            )
        return found

    home = os.path.expanduser(text)
    if text.startswith("~") and home == text:
        raise ConfigError(
            f"{key}={text}: there is no user {text[1:].split('/')[0]}; write ./{text} for a name."
        )
    return re.sub(r"\$\$(?=[A-Z_{])|\$(?:\{(\w+)\}|([A-Z_][A-Z0-9_]*))", variable, home)
