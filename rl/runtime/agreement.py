"""Values that every rank must hold alike, and failures that every rank must share."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from rl.options import ConfigError, flatten


@contextmanager
def fail_together() -> Iterator[None]:
    """If the body raises on any rank, every rank raises after it. Collective over the world.

    For input that each rank reads itself (files that one node may lack): a rank that went on alone would hang in the next
    collective. The body must not be collective where it may raise. ValueError and OSError are about input and become a
    ConfigError, the same on every rank; any other exception goes on where it came from, and is named on the other ranks.
    """
    problem: tuple[bool, str] | None = None
    defect: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = (True, str(error))
    except Exception as error:
        problem, defect = (False, f"{type(error).__name__}: {error}"), error
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    if defect is not None:
        raise defect
    failed = {rank: said for rank, said in enumerate(everyone) if said is not None}
    defects = {rank: text for rank, (is_input, text) in failed.items() if not is_input}
    if defects:
        rank = min(defects)
        raise RuntimeError(f"rank {rank} failed: {defects[rank]}")
    if failed:
        where = "" if len(failed) == len(everyone) else f" (on rank {', '.join(map(str, failed))})"
        raise ConfigError(failed[min(failed)][1] + where)


def agree_on_config(config) -> None:
    """ConfigError on every rank if ranks were started with different configurations. Collective over the world."""
    mine = {key: hashlib.sha256(repr(value).encode()).hexdigest() for key, value in flatten(config).items()}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for key in mine:
        odd = [rank for rank, theirs in enumerate(everyone) if theirs[key] != everyone[0][key]]
        if odd:
            raise ConfigError(f"{key} differs between ranks: rank {', '.join(map(str, odd))} and rank 0 were started differently.")
