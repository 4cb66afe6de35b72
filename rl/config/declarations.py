"""What an algorithm's file declares: the models and data it needs, and its defaults.

The declarations are literals at the top of the file. They are read without running the file, because a configuration is
checked before torch is imported.
"""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.options import ConfigError, listed

ALGORITHMS = Path(__file__).parents[1] / "algorithms"

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
    """Return the names of the algorithms in rl/algorithms."""
    return sorted(path.stem for path in ALGORITHMS.glob("[a-z]*.py"))


@functools.cache
def describe(name: str) -> Algorithm:
    """The declarations of an algorithm, by name or path of a .py file. ConfigError if there is no such file or it is unfit."""
    path = Path(name).expanduser() if name.endswith(".py") else ALGORITHMS / f"{name}.py"
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
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if missing := [function for function in ("collect", "learn") if function not in functions]:
        renamed = " (step(phases, config) was split into collect and learn)" if "step" in functions else ""
        raise ConfigError(
            f"algorithm={name} defines no function {missing[0]}; define collect(phases) -> Batch and "
            f"learn(phases, batch){renamed}."
        )
    return Algorithm(path, needs, defaults)
