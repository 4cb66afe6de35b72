"""Configurations of checks that read no file."""

import pytest

from rl.config.checks import check
from rl.config.options import ConfigError
from rl.config.schema import Config, load_config


def config_with(*overrides: str) -> Config:
    """Return a config with a model and training data, which do not exist."""
    return load_config(None, ["model.path=/models/toy", "data.train=train.jsonl", *overrides])


def refusal(*overrides: str) -> str:
    """Return the sentence with which the checks refuse `config_with`."""
    with pytest.raises(ConfigError) as caught:
        check(config_with(*overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)
