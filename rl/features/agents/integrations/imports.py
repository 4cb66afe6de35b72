"""Import of the packages that integrations need."""

import importlib
from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Return a module of an optional package.

    Raises ModuleNotFoundError, naming the extra of setup.py to install; the worker reports it at start-up.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # the package is there, and lacks one of its own requirements
        raise ModuleNotFoundError(
            f"module={module} is not installed. Run pip install 'lockstep-rl[{extra}]' in the environment of "
            "the workers."
        ) from None
