"""Weights of a class of transformers as rows on the ranks that share a copy, whole only while they compute.

Each rank holds an equal number of rows of every parameter, as a tensor parallel rank holds rows of a layer of
Megatron (`rl.models.by_class.ROWS`). Megatron's gradient buffers and optimizer, the refit and checkpoints so
treat them as such. Before a layer computes, all its parameters are gathered; afterwards only their rows
remain. The backward pass gathers them again, and adds up the ranks' gradients in float32. This is what
torch's `fully_shard` does, whose own shards, gradients and optimizer would need another form of every check.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered together: those of a layer, or of a module outside of the layers."""

    shards: list[Parameter]
    rows: list[int]
    """Rows of each whole parameter."""
    places: list[tuple[dict[str, Any], str, int]]
    """The modules' dictionaries of parameters, with name and index of each parameter."""


class _Packed(NamedTuple):
    """A view of a whole parameter that a backward pass needs."""

    unit: Unit
    number: int
    """Index of the parameter in the unit."""
    size: torch.Size
    stride: Sequence[int]
    offset: Any


class Shards:
    """The rows of a model's parameters on this rank. It replaces the parameters of the model.

    group: the ranks that share a copy. With one rank nothing changes.
    """

    def __init__(self, model: Module, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, group.size()
        self._units: dict[Module, Unit] = {}
        self._live: dict[int, tuple[Unit, int]] = {}
        """Address of a whole parameter in a pass -> its unit and index."""
        self._again: tuple[Unit, list[Tensor]] | None = None
        """Whole parameters of the unit that the backward pass computes."""
        if self._size > 1:
            self._divide(model)

    def _divide(self, model: Module) -> None:
        found: dict[Tensor, tuple[Parameter, int]] = {}
        for module in _units_of(model):
            places: list[tuple[dict[str, Any], str, int]] = []
            whole: list[Parameter] = []
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        places.append((part._parameters, name, len(whole)))
                        whole.append(parameter)
            for parameter in whole:
                if parameter not in found:
                    rows = len(parameter)
                    shape = (-(-rows // self._size), *parameter.shape[1:])
                    found[parameter] = Parameter(parameter.new_empty(shape)), rows
            shards = [found[parameter] for parameter in whole]
            self._units[module] = Unit([shard for shard, _ in shards], [rows for _, rows in shards], places)
        for module, unit in self._units.items():
            for parameters, name, index in unit.places:
                parameters[name] = unit.shards[index]
            module.forward = self._gathering(unit, module.forward)
        shard: Any  # Megatron's and torch's marks are attributes of tensors
        for shard, _ in found.values():
            shard.allreduce = False  # reduced over the ranks with the same rows (`Grid.with_shards`)
            shard.grad_dtype = torch.float32

    def _gathering(self, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` with whole parameters."""

        def gathered(*args: Any, **kwargs: Any) -> Any:
            whole = self._whole(unit)
            try:
                for parameters, name, index in unit.places:
                    parameters[name] = whole[index]
                return forward(*args, **kwargs)
            finally:
                for parameters, name, index in unit.places:
                    parameters[name] = unit.shards[index]
                for tensor in whole:  # another tensor may get the address
                    self._live.pop(tensor.untyped_storage().data_ptr(), None)

        return gathered

    def _whole(self, unit: Unit) -> Sequence[Tensor]:
        whole: Sequence[Tensor] = _WholeUnit.apply(self, unit, *unit.shards)
        for index, tensor in enumerate(whole):
            self._live[tensor.untyped_storage().data_ptr()] = unit, index
        return whole

    def whole_of(self, module: Module) -> Sequence[Tensor]:
        """Return the whole parameters of a module outside of the layers. Collective over the group."""
        unit = self._units.get(module)
        return list(module.parameters()) if unit is None else self._whole(unit)

    def released(self) -> AbstractContextManager[Any]:
        """Keep no whole parameters for the backward passes of what is computed in the `with` block.

        The ranks of the group compute the same layers in the same order there.
        """
        return self._releasing() if self._units else nullcontext()

    @contextmanager
    def _releasing(self) -> Iterator[None]:
        self._live.clear()

        def pack(tensor: Tensor) -> Tensor | _Packed:
            of = self._live.get(tensor.untyped_storage().data_ptr())
            if of is None:
                return tensor
            return _Packed(*of, tensor.shape, tensor.stride(), tensor.storage_offset())

        def unpack(kept: Tensor | _Packed) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            if self._again is None or self._again[0] is not kept.unit:
                self._again = None  # the memory of one unit at a time
                self._again = kept.unit, self.gather(kept.unit)
            return self._again[1][kept.number].as_strided(kept.size, kept.stride, kept.offset)

        with saved_tensors_hooks(pack, unpack):
            yield
        self._live.clear()

    @torch.no_grad()
    def gather(self, unit: Unit) -> list[Tensor]:
        """Return the whole parameters of a unit. Collective over the group."""
        own = torch.cat([shard.detach().view(-1) for shard in unit.shards])
        every = own.new_empty(self._size, len(own))
        dist.all_gather_into_tensor(every.view(-1), own, group=self._group)
        parts = every.split([shard.numel() for shard in unit.shards], 1)
        return [
            part.reshape(-1, *shard.shape[1:])[:rows].contiguous()
            for part, shard, rows in zip(parts, unit.shards, unit.rows, strict=True)
        ]

    def reduce(self, unit: Unit, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's rows of the sum of the ranks' gradients, float32. Collective over the group."""
        self._again = None
        every = torch.zeros(
            self._size,
            sum(shard.numel() for shard in unit.shards),
            dtype=torch.float32,
            device=gradients[0].device,
        )
        parts = every.split([shard.numel() for shard in unit.shards], 1)
        for part, shard, gradient in zip(parts, unit.shards, gradients, strict=True):
            per_rank = len(shard)
            for rank, rows in enumerate(gradient.split(per_rank)):
                part[rank, : rows.numel()] = rows.reshape(-1)
        own = torch.empty_like(every[0])
        dist.reduce_scatter_tensor(own, every.view(-1), group=self._group)
        sizes = [shard.numel() for shard in unit.shards]
        return [part.view_as(shard) for part, shard in zip(own.split(sizes), unit.shards, strict=True)]


class _WholeUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: Shards, unit: Unit, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.unit = shards, unit
        return tuple(shards.gather(unit))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.shards.reduce(ctx.unit, gradients)


def _units_of(model: Module) -> Iterator[Module]:
    """Yield the layers of a model, and all other modules that have parameters of their own."""
    has_own = any(parameter is not None for parameter in model._parameters.values())
    if has_own or isinstance(model, GradientCheckpointingLayer):
        yield model
    else:
        for child in model.children():
            yield from _units_of(child)
