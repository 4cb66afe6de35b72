"""Declarations of formulas: names follow from file names, for example clip-cov, and an unfit file is
named."""

import pytest

from rl.config.checks import check
from rl.config.declarations import read_formula
from rl.config.objective import ADVANTAGES, LOSSES
from rl.config.options import ConfigError
from rl.config.ranges import POSITIVE
from rl.config.schema import load_config
from rl.phases.policy_gradient import check_formulas, policy_loss
from tests.each import each


def test_names_follow_from_file_names():
    assert {"reinforce++", "reinforce++-baseline", "grpo-passk"} < set(ADVANTAGES)
    assert {"dppo-tv", "ppo", "clip-cov"} < set(LOSSES)
    for name, formula in [*ADVANTAGES.items(), *LOSSES.items()]:
        assert formula.function == name.replace("++", "_pp").replace("-", "_")


OPTIONS = """from dataclasses import dataclass
from typing import Annotated
import torch_that_is_not_installed
from rl.config.ranges import POSITIVE
FORMULA = "a"
SOURCE = "b"
@dataclass
class MineOptions:
    size: Annotated[float, POSITIVE] = 2.0
    \"\"\"Size of
    it.\"\"\"
def mine(rewards, *, size): ...
"""


def test_options_are_read_without_what_the_file_imports(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OPTIONS)
    formula = read_formula(path)
    [size] = formula.options
    assert (size.name, size.default, formula.docs) == ("size", 2.0, {"size": "Size of it."})
    assert size.type.__metadata__ == (POSITIVE,) and formula.reads == {"size"}


@pytest.mark.parametrize(
    "old, new, found",
    [
        ("POSITIVE]", "LARGE]", "MineOptions may use only names of dataclasses, typing and rl.config.ranges"),
        (" = 2.0", "", "size needs a default, and a text"),
        ("Annotated[float, POSITIVE] = 2.0", "torch_that_is_not_installed.T = 1", "MineOptions may use only"),
    ],
)
def test_unfit_options_are_named(tmp_path, old, new, found):
    path = tmp_path / "mine.py"
    path.write_text(OPTIONS.replace(old, new))
    with pytest.raises(ConfigError, match=found):
        read_formula(path)


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


OWN = """
def half(rewards, groups, *, share): ...
def mine(logprobs, advantages, mask, *, clip_low, scale=2.0): ...
"""


def test_functions_of_a_file_anywhere_are_advantage_and_loss(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    keys = ["model.path=m", "data.train=[d]", f"objective.advantage={path}:half"]
    keys += [f"objective.loss={path}:mine", "objective.clip_low=0.1"]

    def load(*more):
        check(config := load_config(None, [*keys, *more]))
        return config

    config = load("objective.kwargs.share=0.5", "objective.kwargs.scale=3")
    assert policy_loss(config).function.keywords["token_loss"].__name__ == "mine"
    with pytest.raises(ConfigError, match="parameter share without a value; set objective.kwargs.share"):
        load()
    with pytest.raises(ConfigError, match="objective.kwargs.size is no keyword-only parameter"):
        load("objective.kwargs.size=1")
    with pytest.raises(ConfigError, match="must define a function other"):
        load(f"objective.loss={path}:other")


@each(
    "parameters, words",
    [
        ("logprobs, advantage, mask", "has the positional parameter advantage, .* did you mean advantages"),
        ("logprobs, mask, coefficient_of_mine", "gives it only .*logprobs.* or write it after a \\*"),
        ("logprobs, old_logprobs, advantages, mask, lengths, eps=1.0, *, seed, **more", ""),
    ],
)
def test_an_unknown_column_is_named_before_the_run(tmp_path, parameters, words):
    path = tmp_path / f"own{len(parameters)}.py"  # a file is run once per process
    path.write_text(f"def mine({parameters}): ...\ndef half(rewards, groups, score_details): ...\n")
    keys = [f"objective.loss={path}:mine", f"objective.advantage={path}:half"]
    objective = load_config(None, ["model.path=m", "data.train=[d]", *keys]).objective
    if not words:
        return check_formulas(objective)
    with pytest.raises(ConfigError, match=words):
        check_formulas(objective)
