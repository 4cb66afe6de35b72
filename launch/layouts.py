"""Finds the layout of a run for each number of nodes that it may have (`run.elastic`)."""

from collections.abc import Callable

from rl.config.elastic_checks import as_overrides
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.dry_run.hardware import Hardware
from rl.dry_run.layouts import find_layout
from rl.dry_run.shape import check_layouts, models_of


def layouts_of(config: Config, ranks: int, load: Callable[[list[str]], Config]) -> dict[int, list[str]]:
    """Return number of nodes -> overrides. Raises ConfigError if a listed layout, or all sizes, do not fit.

    ranks: ranks per node. load: returns the run's config with further overrides.
    """
    elastic, found = config.run.elastic, dict[int, list[str]]()
    models, _ = models_of(config)
    for layout in elastic.layouts:
        overrides, nodes = as_overrides(layout), layout["nodes"]
        try:
            check_layouts(load(overrides), nodes * ranks, models)
        except ConfigError as error:
            raise ConfigError(f"run.elastic.layouts, nodes={nodes}: {error}") from error
        found[nodes] = overrides
    if not elastic.layouts:
        for nodes in range(elastic.min_nodes, elastic.max_nodes + 1):
            values = find_layout(config, nodes * ranks, Hardware(ranks_per_node=ranks))
            if values is not None:
                found[nodes] = as_overrides(values)
    if not found:
        raise ConfigError(
            f"run.elastic.min_nodes={elastic.min_nodes} to max_nodes={elastic.max_nodes} with {ranks} "
            "ranks each: the dry run finds no layout that fits; list some in run.elastic.layouts."
        )
    return found
