"""Megatron's pipeline schedule, with transfers between the stages that need no exchange of shapes.

Micro-batches have different lengths. Megatron therefore sends the shape before each tensor, and the host
waits for the device twice to read it. Here every stage packs the same micro-batches and so knows the shapes
in advance. A stage receives activations, and later gradients, in the order of the micro-batches.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl.training.grid import Grid
from rl.training.packing import MicroBatch


def run_schedule(
    chunks: list[torch.nn.Module], rows: list[MicroBatch], step: Callable, grid: Grid, *, forward_only: bool
) -> None:
    """Run the rows through Megatron's schedule. Collective over the pipeline group.

    chunks: parts of the model on this rank. step: Megatron's `forward_step_func`. On CUDA, this function does
    not wait for the device.
    """
    if grid.vpp > 1:
        from rl.training.interleaved import run_interleaved

        return run_interleaved(chunks, rows, step, grid, forward_only=forward_only)
    [model] = chunks
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(rows),
        model=chunks,
        num_microbatches=len(rows),
        seq_length=1,  # unused: `KnownShapes` provides the shapes
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=KnownShapes(grid.groups.pp, model.config, rows, rows),
        pg_collection=grid.groups,
    )


class KnownShapes(P2PCommunicator):
    """Transfers of one run of the schedule. Requires config.variable_seq_lengths.

    activations: the row of each activation that the rank receives, in the order of the transfers. gradients:
    the same for the gradients.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: TransformerConfig,
        activations: list[MicroBatch],
        gradients: list[MicroBatch],
    ) -> None:
        super().__init__(pp_group=pp_group, config=config)
        # A Megatron without this method must fail here. Otherwise it would exchange shapes and wait for the
        # device.
        assert callable(P2PCommunicator._communicate_shapes)
        parts = config.tensor_model_parallel_size if config.sequence_parallel else 1

        def shapes(rows: list[MicroBatch]) -> Iterator[list[int]]:
            return iter([[row.tokens.numel() // parts, 1, config.hidden_size] for row in rows])

        self._activations, self._gradients = shapes(activations), shapes(gradients)

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        """Return the shapes of the tensors to receive from the previous and the next stage."""
        nothing = [0, 0, 0]
        return (
            next(self._activations) if recv_prev else nothing,
            next(self._gradients) if recv_next else nothing,
        )
