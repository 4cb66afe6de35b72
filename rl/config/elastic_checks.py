"""Checks of the sections `run.elastic` and `run.limits`."""

from datetime import datetime
from typing import Any

from rl.config.options import ConfigError, as_override, flatten, show
from rl.config.schema import Config

VARYING = ("training.", "rollout.", "roles.")
"""Beginnings of the keys that may differ between layouts, for example training.tp."""


def check_elastic(config: Config) -> None:
    """Raise ConfigError for numbers and layouts that contradict each other, and without checkpoints."""
    elastic = config.run.elastic
    if not elastic.is_on:
        return
    least, most = elastic.min_nodes, elastic.max_nodes
    if most < least:
        raise ConfigError(
            f"run.elastic.max_nodes={most} is below run.elastic.min_nodes={least}; set it to {least} or more."
        )
    if not config.checkpoint.every and config.run.mode != "check":  # which saves nothing
        raise ConfigError(
            "checkpoint.every=0 leaves no checkpoint from which the other nodes continue when one dies "
            "(run.elastic); set checkpoint.every=1 and checkpoint.background=true."
        )
    if elastic.lost_s < 5:  # leases are renewed each second
        raise ConfigError(
            f"run.elastic.lost_s={elastic.lost_s:g}, but a node that lives is seen once a second at most; "
            "set it to 5 or more."
        )
    known, seen = flatten(config), set()
    for layout in elastic.layouts:
        nodes = layout.get("nodes")
        if type(nodes) is not int or not least <= nodes <= most or nodes in seen:
            raise ConfigError(
                f"run.elastic.layouts has nodes={show(nodes)}, but each layout needs a number of its own, "
                f"from run.elastic.min_nodes={least} to run.elastic.max_nodes={most}."
            )
        seen.add(nodes)
        for key in layout.keys() - {"nodes"}:
            if key not in known or not key.startswith(VARYING):
                raise ConfigError(
                    f"run.elastic.layouts sets {key}, but layouts differ only in keys of training, rollout "
                    "and roles; move it out of the layout (lockstep train --help all lists the keys)."
                )
    if seen and min(seen) > least:
        raise ConfigError(
            f"run.elastic.min_nodes={least}, but the smallest of run.elastic.layouts has nodes={min(seen)}; "
            f"add a layout for {least}, or set run.elastic.min_nodes={min(seen)}."
        )


def check_limits(config: Config) -> None:
    """Raise ConfigError for partitions and times that sbatch would refuse."""
    limits = config.run.limits
    for name in limits.partitions:
        if not name or set(name) & set(", "):
            raise ConfigError(
                f"run.limits.partitions holds {show(name)}, but each entry is the name of one partition; "
                "write e.g. [main, spare]."
            )
    try:
        is_local = not limits.not_before or datetime.fromisoformat(limits.not_before).tzinfo is None
    except ValueError:
        is_local = False
    if not is_local:
        raise ConfigError(
            f"run.limits.not_before={show(limits.not_before)} is not a local time; write it as "
            "2026-12-24T18:00, without a time zone."
        )


def as_overrides(layout: dict[str, Any]) -> list[str]:
    """Return a layout as overrides of a command line."""
    return [as_override(key, value) for key, value in layout.items() if key != "nodes"]
