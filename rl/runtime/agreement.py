"""Values that every rank must hold alike, and failures that every rank must share."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from rl.options import ConfigError, flatten


@contextmanager
def fail_together() -> Iterator[None]:
    """If the body raises ValueError or OSError on any rank, every rank raises ConfigError after it. Collective over the world.

    For input that each rank reads itself (files that one node may lack): a rank that went on alone would hang in the next
    collective. The body must not be collective where it may raise.
    """
    problem: str | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = str(error)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    failed = [rank for rank, text in enumerate(everyone) if text is not None]
    if failed:
        where = "" if len(failed) == len(everyone) else f" (on rank {', '.join(map(str, failed))})"
        raise ConfigError(everyone[failed[0]] + where)


def agree_on_config(config) -> None:
    """ConfigError on every rank if ranks were started with different configurations. Collective over the world."""
    mine = {key: hashlib.sha256(repr(value).encode()).hexdigest() for key, value in flatten(config).items()}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for key in mine:
        odd = [rank for rank, theirs in enumerate(everyone) if theirs[key] != everyone[0][key]]
        if odd:
            raise ConfigError(f"{key} differs between ranks: rank {', '.join(map(str, odd))} and rank 0 were started differently.")
