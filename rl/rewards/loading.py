"""Find a reward function by its name in the config, and refuse one that cannot be called."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rl.config.functions import load_function
from rl.config.reward_sources import SAMPLE_KEYS


def load_reward_function(spec: str, *, kwargs: Mapping[str, Any], key: str = "reward") -> Callable[..., Any]:
    """The function that `spec` names, as `rl.config.functions.load_function` finds it, if it takes the keywords of its calls.

    A function that cannot be called would otherwise cost every sample its score, one by one. `kwargs` are what the config
    passes to each call; `key` is the section of the config that holds function and kwargs, for the messages.

    Raises ValueError if there is no such function, or if it does not take the keywords it will be called with.
    """
    function = load_function(spec, key=f"{key}.function")
    taken = sorted(set(kwargs) & set(SAMPLE_KEYS))
    if taken:
        raise ValueError(f"{key}.kwargs must not set {', '.join(taken)}: each sample brings its own.")
    try:
        inspect.signature(function).bind(**dict.fromkeys(SAMPLE_KEYS), **kwargs)
    except (TypeError, ValueError) as error:  # ValueError: a builtin that does not tell its signature
        raise ValueError(
            f"{key}.function {spec!r} does not take what it is called with, the keywords "
            f"{', '.join([*SAMPLE_KEYS, *kwargs])}: {error}. Name those it reads and take the rest as **extra."
        ) from error
    return function
