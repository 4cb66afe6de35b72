"""Import a reward function by its name in the config and check that it can be called."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rl.config.functions import load_function
from rl.config.reward_sources import SAMPLE_KEYS


def load_reward_function(spec: str, *, kwargs: Mapping[str, Any], key: str = "reward") -> Callable[..., Any]:
    """Return the function that `spec` names, see `rl.config.functions.load_function`.

    It is checked whether the function accepts its keywords. Otherwise it would fail on every sample.

    kwargs: keywords that the config passes to each call. key: config section of the function and its kwargs,
        for error messages.

    Raises ValueError if there is no such function, or if it does not accept the keywords of its calls.
    """
    function = load_function(spec, key=f"{key}.function")
    taken = sorted(set(kwargs) & set(SAMPLE_KEYS))
    if taken:
        raise ValueError(f"{key}.kwargs must not set {', '.join(taken)}: each sample provides its own.")
    try:
        inspect.signature(function).bind(**dict.fromkeys(SAMPLE_KEYS), **kwargs)
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        remedy = "add **extra for the keywords it ignores"
        if "missing" in str(error):
            remedy = f"rename the argument to one of the keywords, or set it in {key}.kwargs"
        raise ValueError(
            f"{key}.function={spec!r} does not accept the keywords it is called with, "
            f"{', '.join([*SAMPLE_KEYS, *kwargs])}: {error}; {remedy}."
        ) from error
    return function
