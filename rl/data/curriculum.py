"""A user-defined order: which prompts an epoch has, in which order, and how often each of them occurs.

# order.py: the first epoch has the shorter half of the prompts, later epochs have all prompts
def order(epoch, prompts, rng):
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
    return by_length[: len(by_length) // 2] if epoch == 0 else rng.permutation(by_length)

lockstep train ... data.curriculum=order.py:order
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from rl.config.functions import call, load_function
from rl.data.prompt_order import EpochOrder, check_seed
from rl.data.prompts import Prompt
from rl.data.reading import describe, first_line

Order = Callable[[int, list[Prompt], np.random.Generator], Sequence[int]]
"""order(epoch, prompts, rng) -> indices into `prompts` (not `Prompt.index`).

For algorithms that learn from rated responses, such as dpo, `prompts` has the rows of `rl.data.preferences`.

The function must return at least one index; indices may repeat. `epoch` counts from 0. `rng` is seeded with
(run.seed, epoch). It must be the only source of randomness, so that all ranks and resumed runs compute the
same order.
"""


class CurriculumOrder(EpochOrder):
    """Draws prompts, np.int64 in [0, len(prompts)), in epochs that the user's function `order` returns.

    A checkpoint has only (epoch, position). A resumed run computes the order of the epoch again, so the order
    must depend on nothing but the arguments of `order`.

    Raises ValueError if there are no prompts, or for a negative seed. Raises ValueError at the start of an
    epoch if `order` fails or returns invalid indices.
    """

    def __init__(self, prompts: Sequence[Prompt], order: Order, *, seed: int):
        if len(prompts) == 0:
            raise ValueError("there are no prompts to draw: data.train must hold at least one.")
        check_seed(seed)

        def order_of(epoch: int) -> np.ndarray:
            # `order` gets a copy of the list. If it sorted our list in place, the indices would mean other
            # prompts.
            arguments = epoch, list(prompts), np.random.default_rng([seed, epoch])
            indices = call(partial(order, *arguments), key=f"data.curriculum, epoch {epoch},")
            return check_order(indices, num_prompts=len(prompts), epoch=epoch)

        key = f"data.curriculum, which must draw from rng only, seed {seed}"
        super().__init__(order_of, owner="data.curriculum returns", key=key)


def check_order(indices: Sequence[int], *, num_prompts: int, epoch: int) -> np.ndarray:
    """Return the result of an order function as np.int64 [n], each in [0, num_prompts).

    Raises ValueError if it is empty, not a flat sequence of integers, or out of range.
    """
    place = f"data.curriculum, epoch {epoch}"
    try:
        found = np.asarray(indices if hasattr(indices, "__array__") else list(indices))
    except (TypeError, ValueError):  # not iterable, or rows of different length
        raise ValueError(f"{place}: must return a sequence of indices, not {describe(indices)}.") from None
    if found.size == 0:
        raise ValueError(f"{place}: returned no indices; an epoch needs at least one prompt.")
    if found.dtype == bool:
        raise ValueError(f"{place}: returned a mask instead of indices: return np.flatnonzero(mask).")
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(
            f"{place}: must return a flat sequence of integers, not {found.dtype} of shape "
            f"{list(found.shape)}."
        )
    outside = found[(found < 0) | (found >= num_prompts)]
    if outside.size:
        raise ValueError(
            f"{place}: index {outside[0]} must be in 0..{num_prompts - 1}; indices are positions in the list "
            "that the function receives (not Prompt.index)."
        )
    return found.astype(np.int64)


def load_order(spec: str) -> Order:
    """Return the function that `spec` names, as `rl.config.functions.load_function` does.

    Raises ValueError as `load_function` does, and if the function cannot be called with (epoch, prompts,
    rng).
    """
    function = load_function(spec, key="data.curriculum")
    try:
        inspect.signature(function).bind(0, [], None)
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise ValueError(
            f"data.curriculum={spec!r} cannot be called with (epoch, prompts, rng): {first_line(error)}."
        ) from error
    return function
