"""Accumulation of gradients over micro-batches, and their reduction over data parallel ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from rl.config.schema import Training
from rl.models.layout import Weight
from rl.runtime.collectives import gather_texts
from rl.runtime.names import kind_of
from rl.training.grid import Grid
from rl.training.optimizer import gradient_of, main_weights, owned_part
from rl.training.weights import WeightMap


def with_gradients(chunks: Sequence, training: Training, grid: Grid) -> list[DistributedDataParallel]:
    """Wrap the chunks of a model for training: float32 gradients, sharded over the data parallel ranks.

    With `training.overlap_gradients`, a bucket is reduced as soon as its gradients are complete, during the
    backward pass of the last micro-batch. Megatron can also overlap the all-gather of the parameters with the
    next forward pass. This second overlap is not used, because the refit or a checkpoint would have to wait
    for the all-gather after the last update of a step.

    Collective over the world.
    """
    config = chunks[0].config
    chosen = "on" if torch.cuda.is_available() else "off"
    wanted = chosen if training.overlap_gradients == "auto" else training.overlap_gradients
    overlap = grid.replicas > 1 and wanted == "on"
    config.finalize_model_grads_func = _finalize_without_division
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
    )
    wrapped = [DistributedDataParallel(config, options, chunk, pg_collection=grid.groups) for chunk in chunks]
    if overlap:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    if config.transformer_impl == "transformer_engine":
        for chunk in chunks:
            if any(parameter.requires_grad for parameter in islice(chunk.decoder.parameters(), 1)):
                _accumulate_in_products(chunk)
    return wrapped


@contextmanager
def only_hooks(wrapped: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Run backward passes in this block only for the hooks of parameters.

    Gradients are neither added up over micro-batches nor reduced over ranks. The exception is overlapped
    reduction (`training.overlap_gradients`): both then happen as in an update. After the block, the gradient
    buffers hold no meaningful values.
    """
    config = wrapped[0].config
    reduce = config.finalize_model_grads_func
    if wrapped[0].ddp_config.overlap_grad_reduce:
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        yield
        return
    config.finalize_model_grads_func = None
    parameters = [parameter for chunk in wrapped for parameter in chunk.params_with_grad]
    for parameter in parameters:
        parameter.grad_added_to_main_grad = True  # Megatron's own hook then drops the gradient
    try:
        yield
    finally:
        config.finalize_model_grads_func = reduce
        for parameter in parameters:
            parameter.grad_added_to_main_grad = False


def gradient_buffers(wrapped: Sequence[DistributedDataParallel]) -> list[torch.Tensor]:
    """Return the memory of all gradients of this rank."""
    return [
        buffer.grad_data for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]


def _accumulate_in_products(model: torch.nn.Module) -> None:
    """Make Transformer Engine's weight-gradient products accumulate into the float32 gradients.

    Otherwise each micro-batch writes bfloat16 gradients and adds them in another pass over memory. Megatron's
    `gradient_accumulation_fusion` would do the same, but its output layer then requires apex.
    """
    from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear

    for module in model.modules():
        if isinstance(module, (GroupedLinear, LayerNormLinear, Linear)):
            module.fuse_wgrad_accumulation = True
            for name, parameter in module.named_parameters(recurse=False):
                parameter.adds_in_product = name.startswith("weight")  # not biases and norms


def _finalize_without_division(model: Any, num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Reduce gradients without Megatron's division by the token count.

    The loss already contains its denominator.
    """
    finalize_model_grads(model, None, **kwargs)


NORM_TOLERANCE = 1e-3
"""Maximum relative difference between the expected and the actual norm; norms are summed in float32."""
ADDED, SMALLEST = 1e-6, 1e-12
"""Number that Megatron adds to the norm before dividing by it, and norm whose squares float32 lacks."""
COPIES = 2.0**-10
"""Maximum relative difference between the gradients of copies; ranks may add up in another order."""
SOME = 1 << 18
"""Maximum number of elements of `first_rows`."""
ELEMENTS = 256
"""Approximate number of elements of a weight that are compared."""


class WrongReduction(RuntimeError):
    """Raised on every rank if gradients were not summed exactly once over the ranks, or clipped wrongly."""


class StateChanged(RuntimeError):
    """Raised on every rank if the optimizer's state changed between two updates."""


def part_of(
    learned: WeightMap, weight: Weight, config: TransformerConfig
) -> tuple[torch.Tensor | None, float]:
    """Return this rank's parameter of a weight, and the factor of its gradient in a sum over all ranks.

    The factor prevents the sum from counting a gradient more than once. For example, it is 0 for a copy that
    another tensor parallel rank counts. Returns None and 0 if this rank learns no part of the weight.
    """
    parameter = learned.parameter(weight) if learned.holds(weight) else None
    if parameter is None or not parameter.requires_grad:
        return None, 0.0
    tp, tp_rank = learned.tensor_split(weight)
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        return parameter, 1 / tp
    norms_of_heads = ("q_layernorm", "k_layernorm")  # each rank adds the gradient of its own heads
    in_parts = config.qk_layernorm and any(name in weight.megatron for name in norms_of_heads)
    in_parts = in_parts or weight.cut.split or getattr(parameter, "sequence_parallel", False)
    return parameter, float(in_parts or tp_rank == 0)


def first_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the first rows of a tensor, with at most SOME elements if it has more than one row."""
    return tensor[: max(1, SOME * len(tensor) // max(1, tensor.numel()))]


@dataclass
class Watched:
    """A weight whose gradient is compared: about ELEMENTS of its elements are added up.

    row: number of the weight's kind. parameter, share: as `part_of` returns them. code: a factor that keeps
    errors of different weights from cancelling each other.
    """

    row: int
    parameter: Any
    share: float
    code: float
    is_on: bool = True
    found: list[torch.Tensor] = field(default_factory=list)

    def add(self, gradient: torch.Tensor) -> None:
        """Add the sum of an unreduced gradient, and the sum of its absolute values."""
        if self.is_on:
            flat = gradient.detach().reshape(-1)  # a transposed factor's gradient is not contiguous
            some = flat[:: self._stride].double() * (self.share * self.code)
            self.found.append(torch.stack((some.sum(), some.abs().sum())))

    def reduced(self, part: torch.Tensor, first: int) -> torch.Tensor:
        """Return the sum of a part of the reduced gradient, float64 []. first: index of its first element."""
        return self.code * part[-first % self._stride :: self._stride].sum(dtype=torch.float64)

    @property
    def _stride(self) -> int:
        # Odd, so that not only one column is added up: the head's gradient has columns whose sum is 0.
        return self.parameter.numel() // ELEMENTS | 1


class ReductionProbe:
    """Compares reduced gradients with those of all ranks' backward passes, in one sum per kind of weight.

    With overlapped reduction, a hook reads the unreduced gradient of one weight of each kind per update. It
    does not see what Transformer Engine's products add directly (`_accumulate_in_products`). Building a probe
    is collective over the world.
    """

    def __init__(self, learned: WeightMap, wrapped: Sequence[DistributedDataParallel]) -> None:
        config, self._learned = wrapped[0].config, learned
        self._overlaps = wrapped[0].ddp_config.overlap_grad_reduce
        hidden: set[str] = set()
        if self._overlaps:  # a weight is compared on all ranks that hold a part of it
            own = [w.hf[0] for w, part in learned.local() if getattr(part, "adds_in_product", False)]
            hidden = set(gather_texts(own))
        self._members: dict[str, list[str]] = {}
        """Kind -> names of its weights."""
        self._watched: dict[str, Watched] = {}
        self._copies: dict[str, float] = {}
        """Weights with copies on tensor parallel ranks -> factor with which the gradients add up to 0."""
        for number, weight in enumerate(learned.weights):
            name, (tp, tp_rank) = weight.hf[0], learned.tensor_split(weight)
            if learned.holds(weight) and not weight.cut.split and tp > 1:
                self._copies[name] = -1.0 / (tp - 1) if tp_rank else 1.0
            if name in hidden:
                continue
            self._members.setdefault(kind_of(name), []).append(name)
            parameter, share = part_of(learned, weight, config)
            if parameter is not None:
                row = list(self._members).index(kind_of(name))
                self._watched[name] = Watched(row, parameter, share, 1.0 + number % 7)
        self.num_sums = 5 * len(self._members)
        """Number of elements of `sums`."""
        if self._overlaps:
            for watched in self._watched.values():
                watched.parameter.register_hook(watched.add)
            return
        reduce = config.finalize_model_grads_func

        def read_and_reduce(*args: Any, **kwargs: Any) -> None:
            for each in self._watched.values():
                each.add(each.parameter.main_grad)
            reduce(*args, **kwargs)

        config.finalize_model_grads_func = read_and_reduce

    def begin(self, number: int) -> None:
        """Prepare for update `number`. Not collective."""
        chosen = {members[number % len(members)] for members in self._members.values()}
        for name, watched in self._watched.items():
            watched.is_on = not self._overlaps or name in chosen
            watched.found.clear()

    def sums(self, optimizer: MegatronOptimizer) -> torch.Tensor:
        """Return this rank's terms for `check`, float64 [num_sums], between `prepare_grads` and the step."""
        sums = torch.zeros(len(self._members), 5, dtype=torch.float64, device=self._learned.device)
        mains = {parameter: main for parameter, main, _ in main_weights(optimizer)}
        counted = counted_parameters(self._learned)
        for name, watched in self._watched.items():
            row, own = sums[watched.row], watched.parameter
            if watched.found:
                row[:2] += torch.stack(watched.found).sum(0)
                row[2].clamp_(min=len(watched.found))
            if watched.is_on and (part := owned_part(optimizer, own)) is not None:
                reduced = watched.reduced(gradient_of(mains[own]).view(-1), part.start)
                row[3] += reduced * (own in counted)
                row[4] += reduced * self._copies.get(name, 0.0)
        return sums.view(-1)

    def check(self, sums: list[float]) -> None:
        """Raise WrongReduction if two sums differ by more than rounding. sums: `sums`, over the world."""
        for name, row in zip(self._members, range(0, len(sums), 5)):
            own, size, terms, reduced, copies = sums[row : row + 5]
            rounding = 4 * sqrt(terms) * torch.finfo(torch.float32).eps * size
            if not abs(copies) <= max(rounding, COPIES * size):
                raise WrongReduction(
                    f"the tensor parallel ranks have other gradients for their copies of {name}, by "
                    f"{copies:.3g} of {size:.3g}: the gradient is not summed over these ranks."
                )
            if not abs(own - reduced) <= rounding:  # or NaN
                raise WrongReduction(
                    f"the gradients of {name} on all ranks add up to {own:.6g}, but the reduced gradient to "
                    f"{reduced:.6g}: it was not summed exactly once over data parallel ranks, or changed."
                )


def counted_parameters(learned: WeightMap) -> set[torch.Tensor]:
    """Return this rank's parameters without the copies that another rank counts."""
    return {parameter for weight, parameter in learned.local() if learned.is_counted(weight)}


def num_not_zero(wrapped: Sequence[DistributedDataParallel]) -> torch.Tensor:
    """Return how many of some elements of each gradient buffer are not 0, float64 [], without a sync."""
    buffers = gradient_buffers(wrapped)
    counts = [(flat[:: len(flat) // (16 * ELEMENTS) | 1] != 0).sum() for flat in buffers]
    return torch.stack(counts).sum().double() if counts else torch.zeros((), dtype=torch.float64)


@torch.no_grad()
def clipped_norms(
    optimizer: MegatronOptimizer, learned: WeightMap, norm: float, num_changed: torch.Tensor
) -> torch.Tensor:
    """Return this rank's terms for `check_clipped`, float64 [1 + 2 world], after the optimizer's step.

    Element 0 is the squared norm of this rank's clipped gradients, without copies that another rank counts.
    Element 1 + rank is `norm`, the norm that the rank clipped by. Element 1 + world + rank is `num_changed`.
    """
    counted, rank, world = counted_parameters(learned), dist.get_rank(), dist.get_world_size()
    gradients = [gradient_of(main) for parameter, main, _ in main_weights(optimizer) if parameter in counted]
    found = torch.zeros(1 + 2 * world, dtype=torch.float64, device=learned.device)
    if gradients:
        found[0] = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    found[1 + rank], found[1 + world + rank] = norm, num_changed
    return found


def check_clipped(found: Sequence[float], limit: float) -> None:
    """Raise WrongReduction unless the clipped norm follows from the norm that each rank clipped by, and
    StateChanged if sampled elements of the optimizer's state have changed since the last update.

    found: `clipped_norms`, summed over the world. limit: `clip_grad` of the optimizer; 0: no clipping.
    """
    size, world = sqrt(found[0]), len(found) // 2
    for rank, number in enumerate(found[1 + world :]):
        if number:
            raise StateChanged(
                f"{number:.0f} sampled elements of the optimizer's moments and master weights on rank {rank} "
                "have changed since its last update or its load: for example, offloading wrote to them."
            )
    for rank, norm in enumerate(found[1 : 1 + world]):
        expected = norm * min(1.0, limit / (norm + ADDED)) if limit else norm
        if expected > SMALLEST and abs(size - expected) > NORM_TOLERANCE * expected:
            raise WrongReduction(
                f"rank {rank} found a gradient norm of {norm:.6g}, so with optimizer.clip_grad={limit:g} the "
                f"clipped gradient of the whole model has the norm {expected:.6g}, but it has {size:.6g}: "
                "the norm is of other ranks, was not used, or counts weights that do not learn."
            )
