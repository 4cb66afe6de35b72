"""Declarations of formulas: names follow from file names, and an unfit file is named."""

import pytest

from rl.config.declarations import read_formula
from rl.config.options import ConfigError
from rl.config.schema import ADVANTAGES, LOSSES


def test_names_follow_from_file_names():
    assert {"reinforce++", "reinforce++-baseline", "grpo-passk"} < set(ADVANTAGES)
    assert {"dppo-tv", "ppo", "clip-cov"} < set(LOSSES)
    for name, formula in [*ADVANTAGES.items(), *LOSSES.items()]:
        assert formula.function == name.replace("++", "_pp").replace("-", "_")


@pytest.mark.parametrize(
    "text",
    [
        'FORMULA = "a"\nSOURCE = "b"\ndef other(rewards): ...',
        'FORMULA = "a"\ndef mine(rewards): ...',
        'FORMULA = "a"\nSOURCE = "b"\nNEEDS = tuple(range(3))\ndef mine(rewards): ...',
    ],
)
def test_an_unfit_file_is_named(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{path} must define a function mine, and FORMULA"):
        read_formula(path)
