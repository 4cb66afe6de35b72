"""The adapters of a layer: their parameters, and the forward hook that adds scale * B A x to its output.

The hook adds the outputs of the adapters of all parts of a weight in one product. For this product, the
matrices A of the parts are stacked. The matrices B become blocks of one matrix, whose rows have the order of
the parameter's rows.

With tensor parallelism, what a rank holds depends on how the weight W is split. T is the number of tokens, r
the rank of the adapter. Only A x, [T, r], is exchanged.

- W split by rows: every rank has the whole A, and its rows of B. With sequence parallelism, A x is gathered
  from the ranks' parts of the tokens. Otherwise every rank computes the whole A x, and the gradient of A x is
  summed over the ranks.
- W shared by ranks with different samples (`Cut.sharded`): a rank has rows of A and of B, and the model
  gathers both before the layer computes. Only merged values need A from the other ranks.
- W split by columns: every rank has its columns of A, and the whole B. A x is summed over the ranks.

Every rank also holds a whole matrix in each case, for example A if W is split by rows. The gradient of the
whole matrix is complete on each rank, with two exceptions. With sequence parallelism a rank sees only some of
the tokens. The matrix is then marked, and finalize_model_grads sums its gradient. Routed experts see all
tokens of their tensor parallel group, and the group sums their outputs later. Therefore the gradient of the
matrix itself is summed there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn import Parameter, ParameterDict
from torch.nn.functional import grouped_mm, linear, pad

from rl.models.adapters import LowRank, splits_columns
from rl.models.layout import Weight
from rl.training.weights import WeightMap, sharded

KINDS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""Names of the parameters of one adapter, as in the package peft."""


class AdapterSum:
    """Computes the sum that the adapters of one Megatron parameter add to the output of its layer."""

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
        in_weight: bool,
    ):
        keys = {pair.part: f"{pair.module.rpartition('.')[2]}{number}" for pair in pairs}
        self._keys = [keys.get(part) for part in range(len(weight.hf))]
        self._names_of_a = [pair.a.hf for pair in pairs]
        self._module, self._name, self.scale = module, f"weight{number}", scale
        size, _ = base.tensor_split(weight)
        self._rows, self._lengths = _order(weight, base, self._a[0].device)
        self._group = base.grid.groups.tp if weight.expert is None else base.grid.groups.expt_tp
        self._splits_columns = size > 1 and splits_columns(weight)
        is_split = size > 1 and weight.cut.split and not weight.cut.sharded
        self._splits_rows = is_split and not self._splits_columns
        self._sums_gradients = weight.expert is not None and size > 1
        if in_weight and not sequence_parallel:  # with sequence parallelism finalize_model_grads sums them
            self._sums_gradients |= self._splits_columns or self._splits_rows
        self._exchange: Callable[..., Tensor] | None = None
        if weight.expert is None and (self._splits_columns or self._splits_rows):
            self._exchange = _exchange(self._splits_columns, sequence_parallel=sequence_parallel)

    # The model replaces the parameters of a sharded layer while it computes, so they are looked up.

    @property
    def _a(self) -> list[Tensor]:
        return [getattr(self._module, KINDS[0])[key] for key in self._keys if key is not None]

    @property
    def _b(self) -> list[Tensor | None]:
        return self._of_parts(KINDS[1])

    @property
    def _magnitudes(self) -> list[Tensor | None]:
        return self._of_parts(KINDS[2]) if hasattr(self._module, KINDS[2]) else []

    def _of_parts(self, kind: str) -> list[Tensor | None]:
        return [None if key is None else getattr(self._module, kind)[key] for key in self._keys]

    def product(self) -> tuple[Tensor, Tensor]:
        """Return A [n r, in] and B [out, n r] of all n parts. B A has the parameter's shape [out, in]."""
        return self._joined(self._a, self._b)

    def _joined(self, a: Sequence[Tensor], b: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Join the matrices of n parts; return A [..., n r, in] and B [..., out, n r].

        a: [..., r, in] for each part with an adapter. b: [..., out, r] for each part; None for a part without
        an adapter, whose rows of B are 0.
        """
        if self._rows is None:
            assert b[0] is not None
            return a[0], b[0]
        whole, rank, first = torch.cat(list(a), -2), a[0].shape[-2], 0
        blocks = []
        for block, length in zip(b, self._lengths):
            if block is None:
                blocks.append(whole.new_zeros(*whole.shape[:-2], length, whole.shape[-2]))
                continue
            blocks.append(pad(block, (first, whole.shape[-2] - first - rank)))
            first += rank
        return whole, torch.cat(blocks, -2).index_select(-2, self._rows)

    def stacked(self, others: Sequence["AdapterSum"]) -> tuple[Tensor, Tensor]:
        """Return A [E, n r, in] and B [E, out, n r] of E experts of one layer. others: all E of them."""
        a = [torch.stack(parts) for parts in zip(*(other._a for other in others))]
        b = [None if None in parts else torch.stack(parts) for parts in zip(*(other._b for other in others))]
        return self._copies(*self._joined(a, b))

    def add(self, x: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        """Return out + scale * B A x. With DoRA, the result is multiplied by the factors of the rows.

        bias: the bias that `out` includes, or None. DoRA's factors do not apply to it.
        """
        a, b = self._copies(*self.product())
        hidden = linear(x, a)
        if self._exchange is not None:
            hidden = self._exchange(hidden, group=self._group)
        total = torch.addmm(out.flatten(0, -2), hidden.flatten(0, -2), b.t(), alpha=self.scale)
        if (factors := self.factors()) is not None:
            total = (total * factors if bias is None else (total - bias) * factors + bias).to(out.dtype)
        return total.view(out.shape)

    def _copies(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B.

        If nothing else sums the gradient of the unsplit matrix over the ranks, its backward pass does.
        """
        if self._sums_gradients:
            a, b = (a, self._copied(b)) if self._splits_columns else (self._copied(a), b)
        return a, b

    def parts(self) -> tuple[Tensor, ...]:
        """Return A, B and, with DoRA, the factors: the arguments `parts` of `merge`."""
        factors = self.factors()
        copies = self._copies(*self.product())
        return copies if factors is None else (*copies, factors)

    def merge(self, base: Tensor, *parts: Tensor) -> Tensor:
        """Return base + scale * B A, computed in float32 and rounded once.

        parts: A, B and, with DoRA, the factors, by which the rows of the sum are multiplied.
        """
        a, b, *factors = parts
        total = torch.addmm(base.float(), b.float(), a.float(), alpha=self.scale)
        return (total * factors[0][:, None] if factors else total).to(base.dtype)

    def merged(
        self, base: Tensor, factors: Tensor | None, gathered: Mapping[tuple[str, ...], Tensor]
    ) -> Tensor:
        """Return the result of `merge` for the present A and B. gathered: whole matrices A by name."""
        a = [gathered.get(name, own) for name, own in zip(self._names_of_a, self._a, strict=True)]
        return self.merge(base, *self._joined(a, self._b), *([] if factors is None else [factors]))

    @torch.no_grad()
    def take_out(self, base: Tensor) -> None:
        """Subtract scale * B A from the weight."""
        a, b = self.product()
        base.copy_(torch.addmm(base.float(), b.float(), a.float(), alpha=-self.scale))

    @torch.no_grad()
    def start_magnitudes(self) -> None:
        """Set DoRA's magnitudes to the lengths of W's rows. The numbers are the same in every layout."""
        if not self._magnitudes:
            return
        base = getattr(self._module, self._name).float()
        if self._splits_columns:
            parts = [torch.empty_like(base) for _ in range(self._group.size())]
            dist.all_gather(parts, base, group=self._group)
            base = torch.cat(parts, 1)
        for magnitude, part in zip(self._magnitudes, self._in_parts(base.square().sum(1).sqrt())):
            if magnitude is not None:
                magnitude.copy_(part)

    def _in_parts(self, lengths: Tensor) -> tuple[Tensor, ...]:
        """Split values per row of the parameter, [out]; return the values of each layer of the checkpoint."""
        if self._rows is not None:
            lengths = torch.empty_like(lengths).index_copy_(0, self._rows, lengths)
        return lengths.split(self._lengths)

    def factors(self) -> Tensor | None:
        """Return DoRA's factor of each row, float32 [out]: magnitude / length. Returns None without DoRA.

        The factor is 1 for a row that has no magnitude. As in the paper (section 4.3), the gradient treats
        the length as a constant.
        """
        if not self._magnitudes:
            return None
        lengths = self._row_lengths()
        magnitudes = self._magnitudes[0]
        if self._rows is not None:
            own = zip(self._magnitudes, self._in_parts(lengths))
            magnitudes = torch.cat([length if part is None else part for part, length in own])[self._rows]
        assert magnitudes is not None, "a weight of one part has a magnitude"
        if self._sums_gradients and self._splits_columns:
            magnitudes = self._copied(magnitudes)
        return magnitudes / lengths

    @torch.no_grad()
    def _row_lengths(self) -> Tensor:
        """Return the length of each row of W + scale * B A, float32 [out]."""
        base = getattr(self._module, self._name)
        squares = self.merge(base.float(), *self.product()).square().sum(1)
        if self._splits_columns:
            dist.all_reduce(squares, group=self._group)
        return squares.sqrt()

    def has_constant_lengths(self) -> bool:
        """Return whether the gradient treats the lengths of rows as constants. Not for sharded layers."""
        with torch.enable_grad():
            factors = self.factors()
        return factors is None or torch.autograd.grad(factors.sum(), self._a, allow_unused=True)[0] is None

    def _copied(self, part: Tensor) -> Tensor:
        """Return the matrix, which all ranks of the weight hold; its gradient is summed over the ranks."""
        return tensor_parallel.copy_to_tensor_model_parallel_region(part, group=self._group)


def add_parameters(
    module: torch.nn.Module, number: str, pairs: Sequence[LowRank], base: WeightMap, sequence_parallel: bool
) -> dict[str, Parameter]:
    """Add the parameters of one weight's adapters to the weight's module; return them by name.

    number: the digits after "weight" in the name of the weight, for example "3" for expert 3 of Transformer
    Engine's grouped experts; "" for other layers.
    """
    weight = getattr(module, f"weight{number}")
    added = {}
    for pair in pairs:
        size, _ = base.tensor_split(pair.base)
        for kind, part in zip(KINDS, pair.weights):
            if not hasattr(module, kind):
                setattr(module, kind, ParameterDict())
            dtype = torch.float32 if part.float32 else weight.dtype
            parameter = Parameter(weight.new_empty(part.megatron_shape(size), dtype=dtype))
            # Megatron reads both attributes. `allreduce` selects the data parallel group for the gradient.
            # `sequence_parallel` says that each rank's gradient covers only the rank's part of the tokens.
            in_parts = sequence_parallel and pair.base.expert is None and not part.cut.split
            vars(parameter).update(allreduce=getattr(weight, "allreduce", True), sequence_parallel=in_parts)
            if part.cut.sharded and size > 1:
                sharded(parameter, part.shapes[0][0])
            key = f"{pair.module.rpartition('.')[2]}{number}"
            getattr(module, kind)[key] = parameter
            added[f"{kind}.{key}"] = parameter
    return added


def _order(weight: Weight, base: WeightMap, device: torch.device) -> tuple[Tensor | None, list[int]]:
    """Return the index of each row of a parameter in the concatenated parts, and the parts' numbers of rows.

    Within a part, the rows have the order of the checkpoint. The first result is None if the parameter holds
    only one piece, for example o_proj, because its rows have the checkpoint's order already.
    """
    pieces = base.pieces(weight)
    of_part = [[piece for piece in pieces if piece.hf == name] for name in weight.hf]
    lengths = [sum(stop - start for (start, stop), *_ in (p.hf_box for p in part)) for part in of_part]
    if len(pieces) == 1 or weight.cut.sharded:
        return None, lengths
    rows, at = torch.empty(sum(lengths), dtype=torch.int64), 0
    for part in of_part:
        for piece in sorted(part, key=lambda piece: piece.hf_box):
            start, stop = piece.local_box[0]
            rows[start:stop] = torch.arange(at, at + stop - start)
            at += stop - start
    return rows.to(device), lengths


def _exchange(by_columns: bool, *, sequence_parallel: bool) -> Callable[..., Tensor]:
    """Return the collective for A x of a weight that is split over tensor parallel ranks."""
    if by_columns and sequence_parallel:
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region
    if by_columns:
        return tensor_parallel.reduce_from_tensor_model_parallel_region
    if sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region
    return tensor_parallel.copy_to_tensor_model_parallel_region


def hook_of(module: torch.nn.Module, sums: Sequence[AdapterSum]) -> Callable[..., Any]:
    """Return the forward hook that adds the outputs of the adapters of a layer's weights."""
    if isinstance(module, torch.nn.Linear):
        return _plain_hook(sums[0])
    return grouped_hook(sums) if hasattr(module, "num_gemms") else _single_hook(sums[0])


def _plain_hook(added: AdapterSum) -> Callable[..., Tensor]:
    """Return a hook for a linear layer of torch."""

    def hook(module: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
        return added.add(args[0], output, module.bias)

    return hook


def _single_hook(added: AdapterSum) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a hook for a module with one weight."""

    def hook(module: Any, args: tuple, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        out, bias = output
        own = module.bias if bias is None and getattr(module, "bias", None) is not None else None
        return added.add(args[0], out, own if own is not None and own.numel() else None), bias

    return hook


def grouped_hook(added: Sequence[AdapterSum]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a hook for Transformer Engine's layer of several experts.

    The hook's second argument is the number of tokens of each expert. One grouped product serves all experts.
    Separate products would need about ten kernels per expert, which would take longer to launch than to run.
    """

    def hook(module: Any, args: tuple, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        x, splits = args
        out, bias = output
        experts = Experts.of(splits, x.device)
        a, b = added[0].stacked(added)
        total = out.add(experts.product(experts.product(x, a), b), alpha=added[0].scale)
        factors = [expert.factors() for expert in added]
        if factors[0] is not None:
            parts = zip(total.split(splits), factors, strict=True)
            total = torch.cat([part * factor for part, factor in parts]).to(out.dtype)
        return total, bias

    return hook


class Experts(NamedTuple):
    """Says which rows of a tensor [T, ...] belong to which expert. The rows have the order of the experts."""

    ends: Tensor
    """Index after the last row of each expert, int32 [E]."""
    has_rows: Tensor
    """Whether each expert has rows, bool [E, 1, 1]."""

    @classmethod
    def of(cls, splits: Sequence[int], device: torch.device) -> "Experts":
        """Return the bounds for these numbers of rows per expert."""
        counts = torch.tensor(splits, dtype=torch.int32).to(device, non_blocking=True)
        return cls(counts.cumsum(0, dtype=torch.int32), (counts > 0)[:, None, None])

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return W x for the rows of each expert, [T, out]. x: [T, in]; weights: [E, out, in].

        Both operands are padded, because `grouped_mm` requires that the size of a row is a multiple of 16
        bytes. The gradient of an expert without rows is set to 0, because on some GPUs torch leaves it
        uninitialised (torch #172439).
        """
        unit = 16 // x.element_size()
        rows, columns = (-size % unit for size in weights.shape[1:])
        if rows or columns:
            weights, x = pad(weights, (0, columns, 0, rows)), pad(x, (0, columns))
        product = grouped_mm(x, weights.where(self.has_rows, 0).transpose(1, 2), offs=self.ends)
        return product[:, : product.shape[1] - rows]
