"""The names of the points of a sweep, which follow from their values."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl.config.options import as_text

LONGEST_NAME = 120
"""Maximum length of a point's name, in characters."""


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return each key's shortest distinct suffix: lr, or training.optimizer.lr beside critic.optimizer.lr."""
    out = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
        out[key] = next(
            end for end in ends if sum(other == end or other.endswith("." + end) for other in keys) == 1
        )
    return out


def name_of(values: Mapping[str, Any], short: Mapping[str, str]) -> str:
    """Return the name of a point, valid for a directory: lr=1e-06_seed=2. A long name ends in a hash."""
    name = "_".join(f"{short[key]}={_word(value)}" for key, value in values.items())
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{name[: LONGEST_NAME - 9]}_{digest}"


def _word(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "-", as_text(value)).strip("-") or "empty"
