"""Weights of a class of transformers as rows on the ranks that share a copy, whole only while they compute.

Each rank holds an equal number of rows of every parameter, as a tensor parallel rank holds rows of a layer of
Megatron (`rl.models.by_class.ROWS`). Megatron's gradient buffers and optimizer, the refit and checkpoints so
treat them as such. Before a layer computes, all its parameters are gathered; afterwards only their rows
remain. The backward pass gathers them again, and adds up the ranks' gradients in float32. This is what
torch's `fully_shard` does, whose own shards, gradients and optimizer would need another form of every check.
"""

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module, Parameter
from transformers.modeling_layers import GradientCheckpointingLayer

from rl.config.schema import Config
from rl.models import by_class
from rl.runtime.collectives import gather_objects
from rl.training.gradients import WrongReduction
from rl.training.weights import sharded


def ranks_per_copy(config: Config, models: Iterable[tuple[dict, bool]]) -> int:
    """Return `rl.models.by_class.ranks_per_copy` for a config. Collective over the world."""
    together = gcd(*Counter(gather_objects(socket.gethostname())).values())
    return by_class.ranks_per_copy(config.training.shard, models, together)


class Unit:
    """Parameters that are gathered together: those of a layer, or of a module outside of the layers.

    They are looked up in each pass, because adapters add some.
    """

    def __init__(self, module: Module) -> None:
        tables: list[dict[str, Any]] = [part._parameters for part in module.modules()]
        self.places = [(table, name) for table in tables for name, own in table.items() if own is not None]
        """The modules' dictionaries of parameters, and the name of each parameter."""
        self.shards: list[Any] = [place[name] for place, name in self.places]
        """Any, because of the marks of `rl.training.weights.sharded`."""


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

    group: the ranks that share a copy, or `memory.CopyRanks`. With one rank nothing changes.
    """

    def __init__(self, model: Module, group: Any) -> None:
        self._group, self.size = group, group.size()
        self._modules: set[Module] = set()
        """Modules whose parameters are gathered together."""
        self._live: dict[int, tuple[Unit, int, StorageWeakRef]] = {}
        """Storage of a whole parameter in a pass -> its unit, its index, and what reserves the address."""
        self.sums = torch.zeros(3, dtype=torch.float64)
        """Three sums over the gradients of this rank's passes: before `reduce`, after it, and of the absolute
        values.

        Each rank's rows have their own factor, so that the rows of a wrong rank change the sum."""
        self._again: tuple[Unit, list[Tensor]] | None = None
        """Whole parameters of the unit that the backward pass computes."""
        if self.size > 1:
            self._divide(model)

    def _divide(self, model: Module) -> None:
        found: dict[Tensor, Parameter] = {}
        for module in _modules_of(model):
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is None:
                        continue
                    if parameter not in found:
                        rows = -(-len(parameter) // self.size)
                        found[parameter] = Parameter(parameter.new_empty(rows, *parameter.shape[1:]))
                        sharded(found[parameter], len(parameter))
                    part._parameters[name] = found[parameter]
            self._modules.add(module)
            module.forward = self._gathering(module, module.forward)

    def _gathering(self, module: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the module's `forward` with whole parameters."""

        def gathered(*args: Any, **kwargs: Any) -> Any:
            unit = Unit(module)
            whole = self._whole(unit)
            try:
                for (place, name), tensor in zip(unit.places, whole, strict=True):
                    place[name] = tensor
                return forward(*args, **kwargs)
            finally:
                for (place, name), shard in zip(unit.places, unit.shards, strict=True):
                    place[name] = shard
                for tensor in whole:
                    self._live.pop(tensor.untyped_storage()._cdata, None)

        return gathered

    def _whole(self, unit: Unit) -> Sequence[Tensor]:
        whole: Sequence[Tensor] = _WholeUnit.apply(self, unit, *unit.shards)
        for index, tensor in enumerate(whole):
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = unit, index, StorageWeakRef(storage)
        return whole

    def whole_of(self, module: Module) -> Sequence[Tensor]:
        """Return the whole parameters of a module outside of the layers. Collective over the group."""
        return self._whole(Unit(module)) if module in self._modules else list(module.parameters())

    def released(self) -> AbstractContextManager[Any]:
        """Keep no whole parameters for the backward passes of what is computed in the `with` block.

        The ranks of the group compute the same layers in the same order there.
        """
        return self._releasing() if self._modules else nullcontext()

    @contextmanager
    def _releasing(self) -> Iterator[None]:
        self._live.clear()

        def pack(tensor: Tensor) -> Tensor | _Packed:
            of = self._live.get(tensor.untyped_storage()._cdata)
            if of is None:
                return tensor
            return _Packed(*of[:2], tensor.shape, tensor.stride(), tensor.storage_offset())

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
        every = own.new_empty(self.size, len(own))
        self._exchange(dist.all_gather_into_tensor, every.view(-1), own)
        parts = every.split([shard.numel() for shard in unit.shards], 1)
        return [
            part.reshape(-1, *shard.shape[1:])[: shard.whole_rows]
            for part, shard in zip(parts, unit.shards, strict=True)
        ]

    def reduce(self, shards: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return this rank's rows of the sum of the ranks' gradients, float32. Collective over the group.

        gradients: of the whole parameters; None is 0.
        """
        self._again = None
        sizes = [shard.numel() for shard in shards]
        options: Any = dict(dtype=torch.float32, device=shards[0].device)
        every, own = torch.zeros(self.size, sum(sizes), **options), torch.empty(sum(sizes), **options)
        for part, shard, gradient in zip(every.split(sizes, 1), shards, gradients, strict=True):
            for rank, rows in enumerate(() if gradient is None else gradient.split(len(shard))):
                part[rank, : rows.numel()] = rows.reshape(-1)
        self._exchange(dist.reduce_scatter_tensor, own, every.view(-1))
        factors = torch.arange(1.0, self.size + 1, dtype=torch.float64, device=own.device)
        self.sums = self.sums.to(own.device)
        for doubles in in_doubles(every):
            self.sums[0] += doubles.sum(1) @ factors
            self.sums[2] += doubles.abs_().sum(1) @ factors
        return [part.view_as(shard) for part, shard in zip(own.split(sizes), shards, strict=True)]

    def _exchange(self, collective: Callable[..., Any], out: Tensor, own: Tensor) -> None:
        """Call the collective; in a dry run, only allocate what it allocates."""
        if own.is_meta:
            self._group.allocate(max(out, own, key=Tensor.numel))
        else:
            collective(out, own, group=self._group)

    def note_reduced(self, gradients: Sequence[Tensor]) -> None:
        """Add what autograd gets of a result of `reduce` to `sums`."""
        for gradient in gradients:
            for doubles in in_doubles(gradient.view(1, -1)):
                self.sums[1] += doubles.sum() * (1 + self._group.rank())


class _WholeUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: Shards, unit: Unit, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.unit = shards, unit
        whole = shards.gather(unit)
        frozen = [tensor for tensor, shard in zip(whole, own, strict=True) if not shard.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        ctx.set_materialize_grads(False)
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        learned = [number for number, shard in enumerate(ctx.unit.shards) if shard.requires_grad]
        own = [ctx.unit.shards[number] for number in learned]
        reduced = ctx.shards.reduce(own, [gradients[number] for number in learned])
        ctx.shards.note_reduced(reduced)
        found = dict(zip(learned, reduced, strict=True))
        return None, None, *(found.get(number) for number in range(len(gradients)))


def in_doubles(rows: Tensor) -> Iterator[Tensor]:
    """Yield the columns of a matrix in float64, few at once: a float64 copy of a layer would not fit."""
    for part in rows.split(max(1, (1 << 22) // len(rows)), 1):
        yield part.double()


def check_sums(before: float, after: float, size: float, *, num_ranks: int) -> None:
    """Raise WrongReduction if sums over the world of `Shards.sums` differ by more than float32's rounding."""
    if not abs(after - before) <= num_ranks * torch.finfo(torch.float32).eps * size:
        raise WrongReduction(
            f"the gradients that {num_ranks} ranks of a copy add up have the sum {before:.8g} before and "
            f"{after:.8g} afterwards; the reduction between the ranks (NCCL or gloo) lost or changed values."
        )


def _modules_of(model: Module) -> Iterator[Module]:
    """Yield the layers of a model, and all other modules that have parameters of their own."""
    has_own = any(parameter is not None for parameter in model._parameters.values())
    if has_own or isinstance(model, GradientCheckpointingLayer):
        yield model
    else:
        for child in model.children():
            yield from _modules_of(child)
