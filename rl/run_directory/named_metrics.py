"""Checks of config keys that name a metric."""

import difflib
from collections.abc import Sequence

from rl.config.declarations import shipped
from rl.config.options import ConfigError, listed
from rl.config.schema import Config, validates
from rl.run_directory.metric_names import alternatives, find


def check_named_metrics(config: Config, points: Sequence[Config] = ()) -> None:
    """Raise ConfigError for a key whose metric no run of the config logs.

    A user's algorithm may log metrics of any name.

    points: result of `load_points`.
    """
    named = {}
    if config.sweep.stop != "none":
        named["sweep.metric"] = config.sweep.metric
    if config.checkpoint.keep_best:
        named["checkpoint.best_metric"] = config.checkpoint.best_metric
    runs = points or [config]
    for key, name in named.items():
        if find(name) is None and all(run.algorithm in shipped() for run in runs):
            near = difflib.get_close_matches(name, alternatives(), cutoff=0.7)
            advice = f"did you mean {listed(near, 'or')}?" if near else "docs/metrics.md lists them."
            raise ConfigError(f"{key}={name} is not a metric that runs log; {advice}")
    if config.sweep.stop != "none" and config.sweep.metric.startswith("val") and not validates(config):
        raise ConfigError(
            f"sweep.metric={config.sweep.metric} is a metric of validation, which this run does not have; "
            "set data.val and validation.every, or another sweep.metric."
        )
