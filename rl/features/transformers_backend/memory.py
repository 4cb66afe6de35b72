"""Memory of the passes of a class, from a pass on torch's meta device, which computes no values."""

import functools
import json
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rl.training.rows  # noqa: F401, before Megatron
from rl.config.schema import Training
from rl.features.transformers_backend.model import ClassModel, ClassPolicy, ClassValues
from rl.models import by_class
from rl.models.adapters import LowRank, adapters
from rl.training.attention import PackedRow
from rl.training.rows import RowGroup, positions, row_attention, segments

META = torch.device("meta")


@dataclass(frozen=True)
class CopyRanks:
    """Stands for the group of the ranks that share a copy."""

    count: int
    is_cpu: bool = False
    """Whether a collective copies its largest tensor, as gloo does."""

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return 0

    def allocate(self, largest: Tensor) -> None:
        """Allocate what a collective with this tensor allocates."""
        if self.is_cpu:
            largest.clone()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes that the operations in its block allocate, while they live."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        held = (*model.parameters(), *model.buffers())
        self._seen: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return True  # transformers asks whether no row has several sequences
        compute = _grouped_product if func is torch.ops.aten._grouped_mm.default else func
        out = compute(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            self.now -= size
            del self._seen[key]

        if key not in self._seen:
            self.now += size
            self._seen[key] = weakref.ref(storage, freed)


def _grouped_product(a: Tensor, b: Tensor, offsets: Tensor, *_: Any, **__: Any) -> Tensor:
    """Allocate a grouped product; torch's own function on the meta device accepts only bfloat16."""
    return a.new_empty((*a.shape[:-1], b.shape[-1]) if b.dim() == 3 else (len(offsets), len(a), b.shape[-1]))


@functools.cache  # a pass takes about 0.1 s for each layer
def pass_bytes(
    hf: str,
    recompute: Any,
    dtype: str,
    *,
    values: bool,
    rank: int,
    shard: int,
    tokens: int,
    length: int,
    is_cpu: bool,
    targets: tuple[str, ...] = (),
) -> tuple[int, int] | None:
    """Return the bytes that the layers keep for their backward pass, and the maximum that this pass adds.

    They contain the gradients of embedding and head, but not the head's chunks of logits. None: a layer
    chooses its operations by values, as a loop over the experts that have tokens does.

    hf: config.json. values: of a value model. rank: of the adapters; 0 without. shard: ranks that share a
    copy. tokens: of a row, whose sequences have `length` tokens. targets: adapter.targets.
    """
    weights = SimpleNamespace(groups=SimpleNamespace(tp=CopyRanks(shard, is_cpu)), tp=shard)
    grid: Any = SimpleNamespace(groups=SimpleNamespace(tp=CopyRanks(1)), with_shards=lambda: weights)
    pairs = adapters(by_class.weights(json.loads(hf)), rank=rank, targets=targets) if rank else []
    with META:
        kind = ClassValues if values else ClassPolicy
        model = kind(json.loads(hf), Training(recompute=recompute), getattr(torch, dtype), grid)
        model.shards.sums = torch.zeros(3, dtype=torch.float64)
        if rank:
            _adapt(model, pairs, rank)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_add_and_free)
    groups = [RowGroup(start, min(length, tokens - start)) for start in range(0, tokens, length)]
    keys = {name: torch.from_numpy(array).to(META) for name, array in segments(groups).items()}
    places = torch.from_numpy(positions(groups)).to(META)[None]
    attention = row_attention(groups, keys, META)
    row = PackedRow(attention=attention, position_ids=places)
    if not is_cpu:  # the window is a kernel's argument
        row.near = {getattr(part, "sliding_window", None) or 0: attention for part in model.modules()}
    for packs in dict.fromkeys((model.packs, False)):
        model.packs = packs
        model.attend()
        with suppress(Exception):  # whatever code of a class, or a kernel, makes of tensors without values
            return _forward_and_backward(model, torch.zeros_like(places), row)
    return None


def _forward_and_backward(model: ClassModel, tokens: Tensor, row: PackedRow) -> tuple[int, int]:
    with LiveBytes(model) as live, model.shards.released():
        states = model.hidden(tokens, row)
        kept, end = live.now, states.sum()
        if isinstance(model, ClassPolicy):  # if it is tied, its gradient waits for the embedding's
            end = end + model.head_weight[:1].sum()
        del states
        live.peak = kept
        end.backward()
    return kept, live.peak - kept


def _add_and_free(parameter: Tensor) -> None:
    """Do what Megatron's hook does with a gradient; the sums of gradients are counted elsewhere."""
    parameter.grad = None


def _adapt(model: ClassModel, pairs: Sequence[LowRank], rank: int) -> None:
    """Freeze the model and add its adapters, as `rl.features.adapters` does."""
    model.requires_grad_(False)
    model.embedding.register_forward_hook(lambda _, __, out: out.requires_grad_())
    for pair in pairs:
        part = model.language_model.get_submodule(pair.module)
        a, b = torch.empty(rank, part.in_features), torch.empty(part.out_features, rank)
        own = [x.to(part.weight.dtype).requires_grad_() for x in (a, b)]
        part.register_forward_hook(
            lambda _, args, out, a=own[0], b=own[1]: out + linear(linear(args[0], a), b)
        )
