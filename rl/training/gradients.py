"""Accumulation of gradients over micro-batches, and their reduction over data parallel ranks."""

from math import sqrt

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer

from rl.config.schema import Training
from rl.models.layout import Weight
from rl.training.grid import Grid
from rl.training.optimizer import owned_part
from rl.training.weights import WeightMap


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
    overlap = grid.replicas > 1 and (
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
    if config.transformer_impl == "transformer_engine" and next(model.decoder.parameters()).requires_grad:
        _accumulate_in_products(model)
    return wrapped


def gradient_buffers(wrapped: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the memory of all gradients of this rank."""
    return [buffer.grad_data for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers)]


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


NORM = "decoder.final_layernorm.weight"


class WrongReduction(RuntimeError):
    """Raised on every rank if gradients were not summed exactly once over the data parallel ranks."""


class ReductionProbe:
    """Compares the reduced gradient of one parameter with what the backward passes of all ranks gave for it.

    A reduction that is left out, repeated or divided leaves the replicas equal, so no comparison of weights
    finds it. The parameter is the last norm's weight, whose gradient autograd adds up on every device, or
    with adapters the last layer's last B, whose gradient is not 0 at the start.
    """

    def __init__(self, learned: WeightMap):
        grid = learned.grid
        self._name = NORM if any(w.megatron == NORM for w in learned.weights) else "the last layer's lora_B"
        self._weight = None
        self._reports = self._is_added = False
        if grid.is_last_stage:
            weight, self._weight = _probed(learned)
            _, part = learned.tensor_split(weight)
            self._reports = weight.cut.split or part == 0
            self._is_added = self._reports or getattr(self._weight, "sequence_parallel", False)
        self._found: list[torch.Tensor] = []
        if self._weight is not None:
            self._weight.register_hook(self._add)

    def _add(self, gradient: torch.Tensor) -> None:
        found = gradient.detach().float()
        self._found.append(torch.stack((found.sum(), found.abs().sum())))

    def begin(self) -> None:
        """Forget the gradients of the last update."""
        self._found.clear()

    def sums(self, optimizer: MegatronOptimizer) -> torch.Tensor:
        """Return this rank's part of what `check` compares, float64 [4], to be summed over the world.

        Call it between the reduction and the optimizer's step.
        """
        sums = torch.zeros(4, dtype=torch.float64)
        if self._weight is not None:
            if self._is_added and self._found:
                sums[:2] = torch.stack(self._found).double().sum(0).cpu()
                sums[2] = len(self._found) * self._weight.numel()
            if self._reports and (part := owned_part(optimizer, self._weight)) is not None:
                sums[3] = self._weight.main_grad.view(-1)[part].sum(dtype=torch.float64).cpu()
        return sums

    def check(self, sums: list[float]) -> None:
        """Raise WrongReduction if the sums over the world differ by more than float32 sums of that length."""
        own, size, terms, reduced = sums
        if abs(own - reduced) > 4 * sqrt(terms) * torch.finfo(torch.float32).eps * size:
            raise WrongReduction(
                f"the gradients of {self._name} on all ranks add up to {own:.6g}, but the "
                f"reduced gradient to {reduced:.6g}: it was not summed exactly once over the data parallel "
                "ranks."
            )


def _probed(learned: WeightMap) -> tuple[Weight, torch.Tensor]:
    """Return the weight of this rank, on the last stage, that a ReductionProbe watches."""
    held = list(learned.local())
    norms = [item for item in held if item[0].megatron == NORM]
    of_adapters = [item for item in held if ".lora_B." in item[0].megatron]
    # An expert that no token chose has no gradient.
    return (norms or [item for item in of_adapters if item[0].expert is None] or of_adapters)[-1]
