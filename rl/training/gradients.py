"""Accumulation of gradients over micro-batches, and their reduction over data parallel ranks."""

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from rl.config.schema import Training
from rl.training.grid import Grid


def with_gradients(model, training: Training, grid: Grid) -> DistributedDataParallel:
    """Wrap a model for training: float32 gradients, sharded over the data parallel ranks.

    With `training.overlap_gradients`, a bucket is reduced as soon as its gradients are complete, during the
    backward pass of the last micro-batch. Megatron can also overlap the all-gather of the parameters with the
    next forward pass. This is not used: the refit or a checkpoint would have to wait for it after the last
    update of a step.

    Collective over the world.
    """
    config = model.config
    on_cuda = next(model.parameters()).is_cuda
    overlap = grid.dp > 1 and (
        training.overlap_gradients == "on" or training.overlap_gradients == "auto" and on_cuda
    )
    config.finalize_model_grads_func = _finalize_without_division
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
        ),
        model,
        pg_collection=grid.groups,
    )
    if overlap:
        config.no_sync_func = wrapped.no_sync
    if config.transformer_impl == "transformer_engine":
        _accumulate_in_products(model)
    return wrapped


def _accumulate_in_products(model: torch.nn.Module) -> None:
    """Make Transformer Engine's weight-gradient products accumulate into the float32 gradients.

    Otherwise each micro-batch writes bfloat16 gradients and adds them in another pass over memory. Megatron's
    `gradient_accumulation_fusion` would do the same, but its output layer then requires apex.
    """
    from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear

    for module in model.modules():
        if isinstance(module, (GroupedLinear, LayerNormLinear, Linear)):
            module.fuse_wgrad_accumulation = True


def _finalize_without_division(model, num_tokens=None, **kwargs):
    """Reduce gradients without Megatron's division by the token count.

    The loss already contains its denominator.
    """
    finalize_model_grads(model, None, **kwargs)
