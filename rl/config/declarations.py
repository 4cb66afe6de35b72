"""Declarations of algorithms, advantage estimators and losses, at the top of their files.

A configuration is checked before torch is imported, and also where torch is not installed. Therefore literals
are read without running the files. From the file of a formula, only the dataclass with its options is run.
"""

import ast
import functools
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from rl.config.options import ConfigError, did_you_mean, listed

ALGORITHMS = Path(__file__).parents[1] / "algorithms"
OBJECTIVES = Path(__file__).parents[1] / "objectives"

NEEDS = {
    "samples": "responses that the policy generates",
    "reward": "their scores",
    "groups": "the samples of each prompt as a group",
    "responses": "the data's own responses (data.response_key)",
    "pairs": "pairs of responses (data.chosen_key, data.rejected_key)",
    "labels": "responses with labels (data.response_key, data.label_key)",
    "preference": "a loss of whole responses (section preference)",
    "reference": "the policy that the run starts from",
    "critic": "a value model",
    "greedy_baseline": "the score of a greedy response to each prompt",
    "implicit_reward": "a reward model that learns during the run",
    "teacher": "models from which the policy learns token by token (section teacher)",
    "dynamic_sampling": "further rounds of generation in a step",
    "old_logprobs": "log-probs of the old policy before the first update of a step",
}
"""Models and data that an algorithm may need. A run builds and reads what its algorithm names, and rejects
settings of the rest."""


# Algorithms -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Algorithm:
    """Declarations of the file of an algorithm."""

    path: Path
    needs: tuple[str, ...]
    defaults: dict[str, Any]


def shipped() -> list[str]:
    """Return the names of the algorithms in rl/algorithms."""
    return sorted(path.stem for path in ALGORITHMS.glob("[a-z]*.py"))


@functools.cache
def describe(name: str) -> Algorithm:
    """Return the declarations of an algorithm, by name or path of a .py file.

    Raises ConfigError if the file does not exist, cannot be read or lacks a declaration.
    """
    path = Path(name).expanduser() if name.endswith(".py") else ALGORITHMS / f"{name}.py"
    if not name.endswith(".py") and name not in shipped():
        raise ConfigError(
            f"algorithm is '{name}', but must be {listed(shipped(), 'or')}, or the path of a .py file"
            + did_you_mean(name, shipped())
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"algorithm={name} cannot be read ({error}); correct the path or the file."
        ) from error
    values = assigned(tree)
    try:
        needs = tuple(ast.literal_eval(values["NEEDS"]))
        defaults = dict(ast.literal_eval(values["DEFAULTS"]))
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


# Advantage estimators and losses --------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """Declarations of the file of an advantage estimator or a loss.

    The fields after `docs` are the literals of the file in lower case; `rl.objectives.advantages` and
    `rl.objectives.losses` describe them.
    """

    function: str
    """Name of the function; of a shipped file, also the file's name."""
    spec: str
    """The function as `rl.config.functions.load_function` reads it."""
    columns: frozenset[str]
    """Positional parameters: columns of the batch that the function reads."""
    parameters: frozenset[str]
    """Keyword-only parameters, including the parameters of `select_tokens`."""
    required: frozenset[str]
    """The keyword-only parameters without a default."""
    options: tuple[Field, ...]
    """The file's own keys of the section `objective`: the fields of its dataclass."""
    docs: dict[str, str]
    """Text under each of these fields."""
    formula: str
    source: str
    needs: tuple[str, ...] = ()
    per_token: bool = False
    per_sample: bool = False
    uses_ratio: bool = True
    recipe: dict[str, Any] = field(default_factory=dict)
    ascending: tuple[tuple[str, str], ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        """Names of the configuration keys, and other parameters, that the function reads."""
        return self.parameters | frozenset(self.docs)


def assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values assigned to single names at the top level of a module."""
    found = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and node.value:
            found[target.id] = node.value
    return found


@functools.cache
def formulas(room: str) -> dict[str, Formula]:
    """Return config name -> declarations of the files of rl/objectives/<room>, which is advantages or
    losses."""
    paths = sorted((OBJECTIVES / room).glob("[a-z]*.py"))
    return {path.stem.replace("_pp", "++").replace("_", "-"): read_formula(path) for path in paths}


@functools.cache
def formula_of(room: str, name: str) -> Formula | None:
    """Return the declarations of the advantage estimator or loss that a config names; None for none.

    name: that of a file of rl/objectives/<room>, or path/to/file.py:function. Raises ConfigError for a
    user's file that cannot be read or lacks the function.
    """
    file, _, function = name.rpartition(":")
    if not file:
        return formulas(room).get(name)
    try:
        return read_formula(Path(file).expanduser(), function)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"objective: {name} cannot be read: {error}; correct the path.") from error


def read_formula(path: Path, own: str = "") -> Formula:
    """Return the declarations of a file. Raises ConfigError if one is missing or no literal.

    own: name of a function in a user's file, which needs no FORMULA and SOURCE. Such a file has no keys of
    the section objective: `objective.kwargs` holds the values of its further parameters.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    values, function = assigned(tree), own or path.stem
    functions = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    names = [field.name.upper() for field in fields(Formula)[7:]]
    try:
        literals = {name.lower(): ast.literal_eval(values[name]) for name in names if name in values}
        arguments = functions[function]
        both = [arguments, *filter(None, [functions.get("select_tokens")])]
        keywords = [pair for each in both for pair in zip(each.kwonlyargs, each.kw_defaults)]
        options, docs = ((), {}) if own else _options(tree, path)
        return Formula(
            function,
            f"{path}:{own}" if own else f"rl.objectives.{path.parent.name}.{function}:{function}",
            frozenset(argument.arg for argument in arguments.args),
            frozenset(argument.arg for argument, _ in keywords),
            frozenset(argument.arg for argument, default in keywords if default is None),
            options,
            docs,
            **({"formula": "", "source": ""} if own else {}) | literals,
        )
    except (KeyError, ValueError, TypeError) as error:
        constants = "" if own else ", and FORMULA and SOURCE as literals"
        raise ConfigError(f"{path} must define a function {function}{constants}: {error!r}.") from error


def _options(tree: ast.Module, path: Path) -> tuple[tuple[Field, ...], dict[str, str]]:
    """Return the fields of the dataclass whose name ends with Options, and the text under each field.

    Only the class and the imports that it may need are run. Raises ConfigError if they cannot be.
    """
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Options")]
    if not found:
        return (), {}
    modules = ("dataclasses", "typing", "rl.config.ranges")
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module in modules]
    names: dict[str, Any] = {"__name__": __name__}
    try:
        exec(compile(ast.Module([*imports, found[0]], []), str(path), "exec"), names)
    except (ImportError, NameError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {found[0].name} may use only names of {listed(modules, 'and')}: {error!r}."
        ) from error
    options, docs = fields(names[found[0].name]), texts_under(found[0])
    for own in options:
        if own.name not in docs or (own.default is MISSING and own.default_factory is MISSING):
            raise ConfigError(
                f"{path}: {own.name} needs a default, and a text in quotes under it for --help."
            )
    return options, docs


def texts_under(definition: ast.ClassDef) -> dict[str, str]:
    """Return field name -> the string literal under the field, in one line."""
    return {
        statement.target.id: " ".join(ast.literal_eval(following.value).split())
        for statement, following in pairwise(definition.body)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if isinstance(following, ast.Expr)
    }


def literal_dict(module: str, name: str) -> dict[str, str]:
    """Return a literal dict at the top of rl/objectives/<module>.py, without running the file."""
    tree = ast.parse((OBJECTIVES / f"{module}.py").read_text(encoding="utf-8"))
    return ast.literal_eval(assigned(tree)[name])
