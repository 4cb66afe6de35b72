"""Loops over the values of a parameter within one test case."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(names: str, values: Iterable[Any]) -> Callable:
    """Run a test for every value, as `pytest.mark.parametrize` would, but as one case.

    names: name of the parameter, or several names with commas between them (the values are then tuples). A
    failure names its value, and a skip skips one value. For tests without state: all values share fixtures.
    """
    keys, values = [name.strip() for name in names.split(",")], list(values)

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def looped(**arguments):
            for value in values:
                given = dict(zip(keys, value)) if len(keys) > 1 else {keys[0]: value}
                try:
                    test(**arguments, **given)
                except pytest.skip.Exception:
                    continue
                except BaseException as error:
                    error.add_note(f"with {given}")
                    raise

        kept = [p for name, p in signature.parameters.items() if name not in keys]
        looped.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return looped

    return decorate
