"""An order of the prompts that the user writes: which prompts take part in an epoch, in which order, and how often.

# order.py: easy problems first, the hard half only from the second epoch on
def order(epoch, prompts, rng):
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
    return by_length[: len(by_length) // 2] if epoch == 0 else rng.permutation(by_length)

python train_rl.py ... data.curriculum=order.py:order
"""

import inspect
from collections.abc import Callable, Sequence

import numpy as np

from rl.config.functions import load_function
from rl.data.prompts import Prompt
from rl.data.reading import describe, first_line
from rl.data.sampler import EpochWalk, check_seed

Order = Callable[[int, list[Prompt], np.random.Generator], Sequence[int]]
"""order(epoch, prompts, rng) -> indices into `prompts` (not `Prompt.index`), at least one, repetition allowed.

epoch: from 0. rng: seeded with (run.seed, epoch); the only source of chance, so that every rank and every resumed run makes the
same order.
"""


class CurriculumSampler(EpochWalk):
    """Walks through the epochs that `order` makes; as PromptSampler otherwise. Draws np.int64 in [0, len(prompts)).

    Only (epoch, position) is checkpointed: the order of an epoch is made again on resuming, so `order` must depend on its
    arguments alone.

    Raises ValueError for no prompts, a negative seed, and whenever an epoch begins for which `order` fails or gives something
    else than indices.
    """

    def __init__(self, prompts: Sequence[Prompt], order: Order, *, seed: int):
        if len(prompts) == 0:
            raise ValueError("cannot draw from 0 prompts: there must be at least one.")
        check_seed(seed)

        def order_of(epoch: int) -> np.ndarray:
            # A list of its own: a function that sorts it in place must not change what the indices mean.
            arguments = epoch, list(prompts), np.random.default_rng([seed, epoch])
            try:
                indices = order(*arguments)
            except Exception as error:  # the user's code, which may raise anything
                raise ValueError(
                    f"data.curriculum failed for epoch {epoch}: {type(error).__name__}: {first_line(error)}"
                ) from error
            return check_order(indices, num_prompts=len(prompts), epoch=epoch)

        super().__init__(order_of, owner="data.curriculum gives it")


def check_order(indices: Sequence[int], *, num_prompts: int, epoch: int) -> np.ndarray:
    """What an order function returned, as np.int64 [n], each in [0, num_prompts).

    Raises ValueError if it is empty, no flat sequence of integers, or out of range.
    """
    place = f"data.curriculum, epoch {epoch}"
    try:
        found = np.asarray(indices if hasattr(indices, "__array__") else list(indices))
    except (TypeError, ValueError):  # no iterable, or rows of different length
        raise ValueError(f"{place}: must return a sequence of indices, it is {describe(indices)}.") from None
    if found.size == 0:
        raise ValueError(f"{place}: returned no indices: an epoch needs at least one prompt.")
    if found.dtype == bool:
        raise ValueError(f"{place}: returned a mask, not indices: return np.flatnonzero(mask).")
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(
            f"{place}: must return a flat sequence of integers, it is {found.dtype} of shape {list(found.shape)}."
        )
    outside = found[(found < 0) | (found >= num_prompts)]
    if outside.size:
        raise ValueError(
            f"{place}: index {outside[0]} is out of range: there are {num_prompts} prompts, and the indices are places in the "
            "list that the function is given, from 0 (not Prompt.index)."
        )
    return found.astype(np.int64)


def load_order(spec: str) -> Order:
    """The function that `spec` names: `package.module:name` or `path/to/file.py:name`, from the working directory.

    Raises ValueError if the module or file, or the name in it, is missing, fails to import, is not callable, or cannot be
    called with (epoch, prompts, rng).
    """
    function = load_function(spec, key="data.curriculum")
    try:
        inspect.signature(function).bind(0, [], None)
    except (TypeError, ValueError) as error:  # ValueError: a builtin that does not tell its signature
        raise ValueError(
            f"data.curriculum {spec!r} cannot be called with (epoch, prompts, rng): {first_line(error)}."
        ) from error
    return function
