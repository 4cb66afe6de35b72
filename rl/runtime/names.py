"""Names of weights: lists of them in messages, and a choice of one weight of each kind."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def listed(names: Sequence[str]) -> str:
    """Return at most four names and the number of the others, for example "a, b, c, d and 2 more"."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def kind_of(name: str) -> str:
    """Return a name without the numbers of layer and expert: model.layers.*.mlp.up_proj, for example."""
    return re.sub(r"\d+", "*", name)


def one_of_each_kind(items: Iterable[T], name_of: Callable[[T], str]) -> list[T]:
    """Return one item of each kind of name, in other layers for other kinds; identical on all ranks."""
    kinds: dict[str, list[T]] = {}
    for item in items:
        kinds.setdefault(kind_of(name_of(item)), []).append(item)
    return [members[7 * place % len(members)] for place, members in enumerate(kinds.values())]
