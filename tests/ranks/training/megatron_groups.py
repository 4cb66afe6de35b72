"""The start of a worker that builds several training grids one after the other.

A worker imports this module before torch: it prepares the environment of its rank.
"""

from collections.abc import Callable

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import torch  # noqa: E402

from rl.runtime.session import session  # noqa: E402
from rl.training.grid import Grid, build_grid  # noqa: E402


def new_grid(tp: int, pp: int, ep: int = 1, etp: int | None = None, cp: int = 1, vpp: int = 1) -> Grid:
    """A grid in the place of the last one. Collective over the world."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    return build_grid(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, vpp=vpp, seed=1)


def run_cases(out_dir: str, cases: tuple[str, ...], results: Callable) -> None:
    """Call `results(how, device)` for each NAME=HOW on all ranks; rank 0 saves what it returns to NAME.pt."""
    with session(RANKS) as device:
        for case in cases:
            name, _, how = case.partition("=")
            found = results(how, device)
            if RANKS.rank == 0:
                torch.save(found, f"{out_dir}/{name}.pt")
