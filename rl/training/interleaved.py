"""Megatron's interleaved schedule (`training.vpp`): several chunks of a model on each pipeline rank.

Chunk c of rank r holds part c * pp + r of the model, so a micro-batch passes every rank vpp times. For
example, with training.pp=2 and training.vpp=2 rank 0 holds parts 0 and 2. While the pipeline fills and
drains, a rank waits for pp - 1 chunks instead of pp - 1 whole stages. Its idle time, relative to its work on
m micro-batches, is (pp - 1) / (vpp m) instead of (pp - 1) / m (arXiv:2104.04473, section 2.2). In exchange
vpp times as many activations travel between ranks, and the first ranks hold the activations of more
micro-batches.

m must be a multiple of pp (`Grid.micro_batch_multiple`); the plans of micro-batches ensure it.
"""

from collections.abc import Callable

import torch
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    get_schedule_table,
)

from rl.training.grid import Grid
from rl.training.packing import MicroBatch
from rl.training.pipeline import KnownShapes


def run_interleaved(
    chunks: list[torch.nn.Module], rows: list[MicroBatch], step: Callable, grid: Grid, *, forward_only: bool
) -> None:
    """Run the rows through the interleaved schedule. Collective over the pipeline group.

    The arguments are as in `rl.training.pipeline.run_schedule`.
    """
    assert len(rows) % grid.micro_batch_multiple == 0, (
        "the plan has a number of micro-batches of another grid"
    )
    activations, gradients = received_rows(rows, grid)
    forward_backward_pipelining_with_interleaving(
        forward_step_func=step,
        data_iterator=[iter(rows) for _ in chunks],
        model=chunks,
        num_microbatches=len(rows),
        seq_length=1,  # unused: `KnownShapes` provides the shapes
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=KnownShapes(grid.groups.pp, chunks[0].config, activations, gradients),
        pg_collection=grid.groups,
    )


def received_rows(rows: list[MicroBatch], grid: Grid) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """Return the rows of the activations and of the gradients that this rank receives, in order.

    A rank receives an input for every pass of a chunk, except for the model's first chunk. The first rank
    receives the outputs of the last rank, except the outputs of the model's last chunk. Gradients travel the
    same way back.
    """
    passes = get_schedule_table(len(rows), grid.vpp, grid.pp)
    all_inputs = [rows[micro] for micro, _ in passes]
    from_other_end = [rows[micro] for micro, chunk in passes if chunk < grid.vpp - 1]
    return (
        from_other_end if grid.is_first_stage else all_inputs,
        from_other_end if grid.is_last_stage else all_inputs,
    )
