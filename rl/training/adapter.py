"""Low-rank adapters on the layers of a training model: W x + scale * B A x, where only A and B learn.

A parameter of Megatron may hold several linear layers of the checkpoint, each with an adapter of its own
(`rl.models.adapters`). A forward hook on its module adds their sum: the A of the parts are stacked, and the B
are the blocks of one matrix whose rows have the parameter's order.

Tensor parallelism. Of a weight that is split by rows every rank has A and its rows of B: A x is gathered from
the parts of the tokens (or copied, with the sum of its gradient). Of a weight that is split by columns it has
its columns of A, and B: A x is summed over the ranks. Only these [T, r] are sent. The gradient of a part that
every rank has is complete on each of them, or it is marked for finalize_model_grads, which sums it (under
sequence parallelism, where a rank sees a part of the tokens). Routed experts see all tokens of their
tensor parallel group, which sums their outputs later; there the gradient itself is summed.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn import Parameter, ParameterDict

from rl.config.adapter import Adapter
from rl.models.adapters import LowRank, adapters, splits_columns
from rl.models.boxes import index
from rl.models.layout import Weight
from rl.models.placement import training_ranges
from rl.training.weights import WeightMap

KINDS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""Names of the parameters of one adapter, as in peft."""


class Adapters:
    """The adapters of one model: their parameters on this rank, and what they add."""

    def __init__(self, adapter: Adapter, base: WeightMap, model: torch.nn.Module, *, seed: int):
        """Freeze the model and add adapters, whose A depend on `seed` and not on the layout. Not collective.

        A value head still learns. Raises ValueError, on every rank, for a target that matches nothing and
        for a pipeline stage without an adapter.
        """
        self.pairs = adapters(
            base.weights, rank=adapter.rank, targets=adapter.targets, dora=adapter.kind == "dora"
        )
        self._base = base
        check_stages(self.pairs, base)
        head = [weight for weight in base.weights if weight.megatron == "value_head.weight"]
        learned = {base.local_name(weight, base.grid.pp_rank) for weight in head if base.holds(weight)}
        parameters = {name: base.parameters[name] for name in learned}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in learned)
        if hasattr(model, "embedding"):  # else nothing before the first adapter has a gradient to recompute
            model.embedding.register_forward_hook(_require_gradient)
        in_parts: bool = model.config.sequence_parallel
        self._sums: dict[tuple[str, ...], _Sum] = {}
        of_module = defaultdict(list)
        for weight, pairs in self._held().items():
            name = base.local_name(weight, base.grid.pp_rank)
            module_name, _, leaf = name.rpartition(".")
            module, number = model.get_submodule(module_name), leaf.removeprefix("weight")
            own = _add_parameters(module, number, pairs, base, in_parts)
            parameters |= {f"{module_name}.{kind}": parameter for kind, parameter in own.items()}
            found = self._sums[weight.hf] = _Sum(
                weight, pairs, module, number, base, scale=adapter.scale, sequence_parallel=in_parts
            )
            of_module[module].append(found)
        for module, sums in of_module.items():
            module.register_forward_hook(_grouped(sums) if hasattr(module, "num_gemms") else _single(sums[0]))
        weights = [weight for pair in self.pairs for weight in pair.weights]
        self.weight_map = base.over([*weights, *head], parameters)
        self._start(seed)

    def _held(self) -> dict[Weight, list[LowRank]]:
        """Return the adapters of each weight that this rank holds."""
        held = defaultdict(list)
        for pair in self.pairs:
            if self._base.holds(pair.base):
                held[pair.base].append(pair)
        return held

    @torch.no_grad()
    def _start(self, seed: int) -> None:
        """Set A to Kaiming's random values, and B to 0."""
        for weight, parameter in self.weight_map.local():
            if ".lora_" not in weight.megatron:
                continue
            parameter.zero_()
            if ".lora_A." in weight.megatron:
                values = _kaiming(weight, seed)
                for piece in weight.megatron_pieces(*self.weight_map.tensor_split(weight)):
                    parameter[index(piece.local_box)] = values[index(piece.hf_box)].to(parameter)

    @torch.no_grad()
    def merged(self, weight: Weight, parameter: Tensor) -> Tensor:
        """Return W + scale * B A on this rank, computed in float32; W itself if it has no adapter."""
        found = self._sums.get(weight.hf)
        return parameter if found is None else found.merged(parameter)


class _Sum:
    """What the adapters of one parameter of Megatron add to its output."""

    def __init__(
        self,
        weight: Weight,
        pairs: Sequence[LowRank],
        module: torch.nn.Module,
        number: str,
        base: WeightMap,
        *,
        scale: float,
        sequence_parallel: bool,
    ):
        parts = {pair.part: f"{pair.module.rpartition('.')[2]}{number}" for pair in pairs}
        self._a = [module.lora_A[key] for key in parts.values()]
        self._b = [module.lora_B[parts[part]] if part in parts else None for part in range(len(weight.hf))]
        self._scale = scale
        size, rank = base.tensor_split(weight)
        device = self._a[0].device
        self._rows, self._lengths = _order(weight, size, rank)
        self._rows = None if self._rows is None else self._rows.to(device)
        grid = base.grid
        self._group = grid.groups.tp if weight.expert is None else grid.groups.expt_tp
        self._sums_gradients = weight.expert is not None and size > 1
        by_columns = splits_columns(weight)
        self._is_copied = {"a": not by_columns, "b": by_columns or not weight.cut.split}
        self._exchange: Callable[..., Tensor] | None = None
        if size > 1 and weight.cut.split and weight.expert is None:
            self._exchange = _exchange(by_columns, sequence_parallel=sequence_parallel)

    def product(self) -> tuple[Tensor, Tensor]:
        """Return A [n r, in] and B [out, n r] of all parts, with B A of the parameter's shape."""
        if len(self._b) == 1:
            return self._a[0], self._b[0]
        blocks = [
            self._a[0].new_zeros(length, 0) if b is None else b for b, length in zip(self._b, self._lengths)
        ]
        return torch.cat(self._a), torch.block_diag(*blocks)[self._rows]

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Return out + scale * B A x."""
        a, b = self.product()
        if self._sums_gradients:
            copy = tensor_parallel.copy_to_tensor_model_parallel_region
            a = copy(a, group=self._group) if self._is_copied["a"] else a
            b = copy(b, group=self._group) if self._is_copied["b"] else b
        hidden = torch.nn.functional.linear(x, a)
        if self._exchange is not None:
            hidden = self._exchange(hidden, group=self._group)
        total = torch.addmm(out.flatten(0, -2), hidden.flatten(0, -2), b.t(), alpha=self._scale)
        return total.view(out.shape)

    def merged(self, base: Tensor) -> Tensor:
        """Return base + scale * B A, computed in float32 and rounded once."""
        a, b = self.product()
        return torch.addmm(base.float(), b.float(), a.float(), alpha=self._scale).to(base.dtype)


def check_stages(pairs: Sequence[LowRank], base: WeightMap) -> None:
    """Raise ValueError if a pipeline stage has no adapter, and so nothing to learn."""
    placement = base.placement
    for stage, (first, stop) in enumerate(training_ranges(placement.num_layers, placement.pp)):
        if not any(first <= pair.base.layer < stop for pair in pairs):
            raise ValueError(
                f"adapter.targets gives no adapter to layers {first} to {stop - 1}, which are pipeline stage "
                f"{stage} of training.pp={placement.pp}: it would have nothing to learn; choose targets in "
                "every stage, or a smaller training.pp."
            )


def _add_parameters(
    module: torch.nn.Module, number: str, pairs: Sequence[LowRank], base: WeightMap, sequence_parallel: bool
) -> dict[str, Parameter]:
    """Add the parameters of the adapters of one weight to its module; return them by name.

    number: follows the weight's name, for Transformer Engine's grouped experts.
    """
    weight = getattr(module, f"weight{number}")
    added = {}
    for pair in pairs:
        size, _ = base.tensor_split(pair.base)
        for kind, part in zip(KINDS, pair.weights):
            if not hasattr(module, kind):
                setattr(module, kind, ParameterDict())
            parameter = Parameter(weight.new_empty(part.megatron_shape(size)))
            # Megatron reads both: which data parallel group reduces the gradient, and whether its parts are
            # of parts of the tokens.
            parameter.allreduce = getattr(weight, "allreduce", True)
            parameter.sequence_parallel = (
                sequence_parallel and pair.base.expert is None and not part.cut.split
            )
            key = f"{pair.module.rpartition('.')[2]}{number}"
            getattr(module, kind)[key] = parameter
            added[f"{kind}.{key}"] = parameter
    return added


def _order(weight: Weight, size: int, rank: int) -> tuple[Tensor | None, list[int]]:
    """Return which row of the concatenated parts is in each row of a parameter, and the rows of each part.

    The first is None for a parameter of one part.
    """
    pieces = weight.megatron_pieces(size, rank)
    if len(weight.hf) == 1:
        return None, []
    of_part = [[piece for piece in pieces if piece.hf == name] for name in weight.hf]
    lengths = [sum(stop - start for (start, stop), *_ in (p.hf_box for p in part)) for part in of_part]
    rows, first = torch.empty(sum(lengths), dtype=torch.int64), 0
    for part, length in zip(of_part, lengths):
        offset = first - min(piece.hf_box[0][0] for piece in part)
        for piece in part:
            (start, stop), *_ = piece.hf_box
            rows[slice(*piece.local_box[0])] = torch.arange(start + offset, stop + offset)
        first += length
    return rows, lengths


def _exchange(by_columns: bool, *, sequence_parallel: bool) -> Callable[..., Tensor]:
    """Return what a weight that is split over tensor parallel ranks does with A x."""
    if by_columns and sequence_parallel:
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region
    if by_columns:
        return tensor_parallel.reduce_from_tensor_model_parallel_region
    if sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region
    return tensor_parallel.copy_to_tensor_model_parallel_region


def _single(added: _Sum):
    """Return a hook for a module with one weight."""

    def hook(module, args, output):
        out, bias = output
        return added.add(args[0], out), bias

    return hook


def _grouped(added: Sequence[_Sum]):
    """Return a hook for Transformer Engine's layer of several experts, which gets their numbers of tokens."""

    def hook(module, args, output):
        x, splits = args
        out, bias = output
        parts = zip(added, x.split(splits), out.split(splits), strict=True)
        return torch.cat([expert.add(tokens, own) for expert, tokens, own in parts]), bias

    return hook


def _require_gradient(module, args, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _kaiming(weight: Weight, seed: int) -> Tensor:
    """Return a random A float32 [r, in] as peft's, uniform in +-1 / sqrt(in)."""
    digest = hashlib.sha256(f"{seed} {weight.hf[0]}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    (shape,) = weight.shapes
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
