"""One file per algorithm: one step, written in the phases of `rl.phases.phases`.

At its top a file declares, as literals, what a run of it needs and which config values make it the published algorithm:

    NEEDS = ("samples", "reward")
    DEFAULTS = {"objective.advantage": "rloo", "objective.reward_kl.coef": 0.05}

    def step(phases, config): ...

`algorithm: path/to/mine.py` in a config runs such a file from anywhere. The declarations are read without running the file,
because a config is checked before torch is imported.
"""

import ast
import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rl.config.functions import import_file
from rl.config.options import ConfigError, listed

NEEDS = {
    "samples": "responses that the policy generates",
    "reward": "their scores",
    "groups": "several samples of each prompt",
    "responses": "the data's own responses (data.response_key)",
    "pairs": "pairs of responses (data.chosen_key, data.rejected_key)",
    "preference": "a loss of whole responses (section preference)",
    "reference": "the policy that the run starts from",
    "critic": "a value model",
    "greedy_baseline": "the score of a greedy response to each prompt",
    "implicit_reward": "a reward model that learns during the run",
    "dynamic_sampling": "further rounds of generation in a step",
}
"""What an algorithm may need; a run builds and reads what is named, and refuses settings of the rest."""


@dataclass(frozen=True)
class Algorithm:
    """What the file of an algorithm declares."""

    path: Path
    needs: tuple[str, ...]
    defaults: dict[str, Any]


def shipped() -> list[str]:
    """Names of the algorithms in this directory."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


@functools.cache
def describe(name: str) -> Algorithm:
    """The declarations of an algorithm, by name or path of a .py file. ConfigError if there is no such file or it is unfit."""
    path = Path(name).expanduser() if name.endswith(".py") else Path(__file__).with_name(f"{name}.py")
    if not name.endswith(".py") and name not in shipped():
        raise ConfigError(
            f"algorithm is '{name}', but must be {listed(shipped(), 'or')}, or the path of a .py file."
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"algorithm {name} cannot be read: {error}.") from error
    literals = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    try:
        needs = tuple(ast.literal_eval(literals["NEEDS"]))
        defaults = dict(ast.literal_eval(literals["DEFAULTS"]))
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"algorithm {name} must set NEEDS, a tuple, and DEFAULTS, a dict, as literals: {error}."
        ) from error
    if unknown := [need for need in needs if need not in NEEDS]:
        raise ConfigError(f"algorithm {name} needs '{unknown[0]}', which is none of {listed(NEEDS, 'or')}.")
    if not any(isinstance(node, ast.FunctionDef) and node.name == "step" for node in tree.body):
        raise ConfigError(f"algorithm {name} has no function step(phases, config).")
    return Algorithm(path, needs, defaults)


def load(name: str) -> ModuleType:
    """The module of an algorithm, by name or path."""
    if not name.endswith(".py"):
        return importlib.import_module(f"rl.algorithms.{name}")
    return import_file(describe(name).path)
