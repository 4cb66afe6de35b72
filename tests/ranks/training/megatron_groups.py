"""Several training grids one after the other in one process, for tests that compare layouts."""

from rl.training.grid import Grid, build_grid


def new_grid(tp: int, pp: int, ep: int = 1, etp: int | None = None) -> Grid:
    """A grid in the place of the last one. Collective over the world."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    return build_grid(tp=tp, pp=pp, ep=ep, etp=etp, seed=1)
