"""Fields of a data set's row that the integrations read."""

from collections.abc import Mapping
from typing import Any


def task_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return `extra_info` of a row, with verl's `interaction_kwargs` added."""
    return {**(row.get("extra_info") or {}), **(row.get("interaction_kwargs") or {})}


def seed_of(row: Mapping[str, Any]) -> int:
    """Return `extra_info.seed` of a row, else the seed of its draw; all samples of a prompt share the
    seed."""
    return int(task_of(row).get("seed", row.get("seed", 0))) % 2**32  # numpy takes no larger seed
