"""Functions that a config names, as `package.module:name` or `path/to/file.py:name`."""

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

FORM = r".+:[A-Za-z_]\w*"
"""Pattern of such a name."""


def load_function(spec: str, *, key: str) -> Callable[..., Any]:
    """The function that `spec` names. A relative path is looked up from the working directory; a file is run once per process.

    `key` is the config's, for the messages. Raises ValueError if the module or file, or the name in it, is missing, fails to
    import, or is not callable.
    """
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise ValueError(f"{key} {spec!r} must have the form package.module:name or path/to/file.py:name.")
    try:
        module = (
            import_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
        )
    except Exception as error:  # an import runs the user's code, which may raise anything
        raise ValueError(
            f"{key} {spec!r}: {location} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if name not in vars(module):
        candidates = [
            n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")
        ]
        raise ValueError(
            f"{key} {spec!r}: {location} has no {name!r}, only {', '.join(candidates) or 'no function'}."
        )
    function = vars(module)[name]
    if not callable(function):
        raise ValueError(f"{key} {spec!r}: {name} is not callable, it is a {type(function).__name__}.")
    return function


def import_file(path: Path) -> ModuleType:
    """Run a .py file as a module, under a name that no installed package has. Whatever the file raises goes on."""
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
