"""Find a reward function by its name in the config."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

SAMPLE_KEYS = ("prompt", "response", "ground_truth", "data_source", "extra_info")
"""Keywords of every call of a reward function; `reward.kwargs` come on top."""


def load_reward_function(spec: str, *, kwargs: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The function that `spec` names: `package.module:name` or `path/to/file.py:name`.

    A relative path is looked up from the working directory. With `kwargs` (the config's `reward.kwargs`) the signature
    is checked too: a function that cannot be called would otherwise cost every sample its score, one by one.

    Raises ValueError if the module or file, or the name in it, is missing, fails to import, is not callable, or does
    not take the keywords it will be called with.
    """
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise ValueError(f"reward.function {spec!r} must have the form package.module:name or path/to/file.py:name.")
    try:
        module = _import_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except Exception as error:  # an import runs the user's code, which may raise anything
        raise ValueError(
            f"reward.function {spec!r}: {location} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if name not in vars(module):
        candidates = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")
        ]
        raise ValueError(
            f"reward.function {spec!r}: {location} has no {name!r}, only {', '.join(candidates) or 'no function'}."
        )
    function = vars(module)[name]
    if not callable(function):
        raise ValueError(f"reward.function {spec!r}: {name} is not callable, it is a {type(function).__name__}.")
    if kwargs is not None:
        _check_keywords(spec, function, kwargs)
    return function


def _import_file(path: Path) -> ModuleType:
    """Run a .py file as a module, under a name that no installed package has."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    module_name = f"reward_file_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up by name
    module_spec.loader.exec_module(module)
    return module


def _check_keywords(spec: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    taken = sorted(set(kwargs) & set(SAMPLE_KEYS))
    if taken:
        raise ValueError(f"reward.kwargs must not set {', '.join(taken)}: each sample brings its own.")
    try:
        inspect.signature(function).bind(**dict.fromkeys(SAMPLE_KEYS), **kwargs)
    except (TypeError, ValueError) as error:  # ValueError: a builtin that does not tell its signature
        raise ValueError(
            f"reward.function {spec!r} does not take what it is called with, the keywords "
            f"{', '.join([*SAMPLE_KEYS, *kwargs])}: {error}. Name those it reads and take the rest as **extra."
        ) from error
