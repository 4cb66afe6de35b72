"""Import of functions that a config names as `package.module:name` or `path/to/file.py:name`."""

import difflib
import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rl.config.options import ConfigError, listed
from rl.workers.messages import sentence_of

T = TypeVar("T")

FORM = r".+:[A-Za-z_]\w*"
"""Regular expression for such a name."""


def load_function(spec: str, *, key: str) -> Callable[..., Any]:
    """Return the function that `spec` names.

    Relative paths start at the working directory; a file is executed once per process. `key` is the config
    key, for the messages. Raises ValueError if the module, file or function is missing, fails to import, or
    is not callable.
    """
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise ValueError(f"{key}={spec!r} must have the form package.module:name or path/to/file.py:name.")
    try:
        module = _module(location)
    except Exception as error:  # an import runs the user's code, which may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{key}={spec!r}: {location} cannot be imported: {reason}; correct the file or its path."
        ) from error
    found = vars(module)
    if name not in found:
        own = [value.__name__ for value in found.values() if inspect.isfunction(value)]
        public = [n for n in own if not n.startswith("_") and found.get(n).__module__ == module.__name__]
        raise ValueError(
            f"{key}={spec!r}: {location} has no {name!r}, only {', '.join(public) or 'no function'}."
        )
    if not callable(found[name]):
        raise ValueError(
            f"{key}={spec!r} must be callable, not a {type(found[name]).__name__}; name a function."
        )
    return found[name]


class UsersError(ValueError):
    """Raised for an error of users' code that its message explains in one sentence, so that the log needs no
    traceback."""


def call(function: Callable[[], T], *, key: str) -> T:
    """Call a user's function. Raises UsersError, with the user's line, in place of any other exception.

    key: the config key with its value, for the message.
    """
    try:
        return function()
    except Exception as error:  # the user's code, which may raise anything
        raise UsersError(f"{key} raised {sentence_of(error)}; correct the function.") from error


def check_parameters(function: Callable[..., Any], accepted: Iterable[str], *, key: str) -> None:
    """Raise ConfigError if the function has a positional parameter without a default that is not accepted.

    key: the config key with its value, for the message.
    """
    known = sorted(accepted)
    for name, own in inspect.signature(function).parameters.items():
        if own.kind is own.POSITIONAL_OR_KEYWORD and own.default is own.empty and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else "name one of them, or write it after a *."
            raise ConfigError(
                f"{key} has the positional parameter {name}, but the program gives it only "
                f"{listed(known, 'and')}; {remedy}"
            )


def companion(spec: str, name: str) -> Callable[..., Any] | None:
    """Return the function `name` in the module or file of the function that `spec` names, if there is one."""
    return vars(_module(spec.rpartition(":")[0])).get(name)


def _module(location: str) -> ModuleType:
    is_file = location.endswith(".py")
    return import_file(Path(location)) if is_file else importlib.import_module(location)


def import_file(path: Path) -> ModuleType:
    """Execute a .py file as a module under a unique name. Exceptions of the file are not caught."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"file_{path.stem}_{zlib.crc32(bytes(path)):08x}"  # several directories may have a reward.py
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)  # not there if it removed itself
        raise
    return module
