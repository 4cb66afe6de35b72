"""Checks of the section `adapter`: contradictions with the rest of the config, and with the model's layers."""

from collections.abc import Sequence

from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.models.adapters import LowRank, adapters
from rl.models.layout import Weight


def check_adapter(config: Config) -> None:
    """Raise ConfigError for keys that contradict each other."""
    adapter = config.adapter
    if not adapter.is_on:
        if adapter.path:
            raise ConfigError(
                f"adapter.path={adapter.path} has no effect with adapter.kind=none, which trains all weights; "
                "set adapter.kind to that of the directory, or leave out adapter.path."
            )
        return
    if adapter.path and adapter.init != "zero":
        raise ConfigError(
            f"adapter.init={adapter.init} chooses the first A and B, but adapter.path={adapter.path} holds "
            "them; leave out one of the two."
        )


def adapters_of(config: Config, weights: Sequence[Weight]) -> list[LowRank]:
    """Return the adapters of a model with these weights; none if the section is off.

    Raises ConfigError for a target that matches no layer.
    """
    adapter = config.adapter
    if not adapter.is_on:
        return []
    try:
        return adapters(weights, rank=adapter.rank, targets=adapter.targets, dora=adapter.kind == "dora")
    except ValueError as error:
        raise ConfigError(str(error)) from error
