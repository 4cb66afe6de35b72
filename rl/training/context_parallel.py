"""Context parallelism: the ranks of a context parallel group share one packed row.

Each rank holds a part of every segment of the row (`rl.training.rows`). A segment is cut into 2 cp chunks,
and rank r holds chunks r and 2 cp - 1 - r (zig-zag; Llama 3, arXiv:2407.21783, section 3.3.2). For example,
with training.cp=2 rank 0 holds chunks 0 and 3, and rank 1 chunks 1 and 2. Tokens of a late chunk attend to
many tokens, so each rank also holds an early chunk. `ContextGroup.split` divides the row. In every layer the
attention gathers the keys and values of the whole row (`PackedRow.keys` in `rl.training.attention`; for MLA
the latents, `rl.training.gathered_latents`; for a gated delta net its inputs, `rl.training.delta_net`) and
computes the results of the rank's queries. The outputs of the head are gathered once per pass. Each rank of
the group then computes the loss of the whole row, so no loss depends on context parallelism.

To Megatron the ranks of a group are data parallel ranks: they hold equal weights, and the sum of their
gradients is the gradient of the row. `rl.models.placement` has the order of the ranks.

T: tokens of the row. W: T and the padding of all parts. W/cp: tokens of a part. R: response tokens of the
row. r: response tokens that a part predicts.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.training.rows import BlockRun, Prefix, RowAttention, RowGroup, ranges


class SegmentPiece(NamedTuple):
    """Adjacent tokens of one segment; numbers are positions in the row."""

    start: int
    length: int
    segment: int
    """First token of the segment."""
    prompt: int = 0
    """First token of the prompt that the segment shares."""
    prompt_length: int = 0


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The context parallel group of this rank; its ranks share rows."""

    size: int
    rank: int
    group: dist.ProcessGroup

    def split(self, groups: list[RowGroup], *, multiple: int) -> "Split":
        """Return the division of a row of adjacent groups into one part per rank. Not collective.

        multiple: each part is padded to a multiple of this number of tokens; all parts have equal lengths.
        """
        pieces: list[list[SegmentPiece]] = [[] for _ in range(self.size)]
        loads = [0] * self.size
        for group in groups:
            for k, (start, length) in enumerate(zip(group.starts, group.segments)):
                prompt = (group.start, group.prompt) if k else (0, 0)
                place = start
                for rank, count in _chunks(length, self.size, loads):
                    own = pieces[rank]
                    if own and own[-1].segment == start and own[-1].start + own[-1].length == place:
                        own[-1] = own[-1]._replace(length=own[-1].length + count)  # the middle of a segment
                    elif count:
                        own.append(SegmentPiece(place, count, start, *prompt))
                    place += count
        length = -(-max(1, *loads) // multiple) * multiple
        place = sum(loads)
        for own, load in zip(pieces, loads):
            if load < length:
                own.append(SegmentPiece(place, length - load, place))
                place += length - load
        return Split(self, pieces)


def _chunks(length: int, size: int, loads: list[int]) -> list[tuple[int, int]]:
    """Return (rank, number of tokens) of the 2 x size chunks of a segment, and add them to the loads.

    The remainder goes, token by token, to the ranks with the fewest tokens so far.
    """
    order = [*range(size), *reversed(range(size))]
    counts = [length // (2 * size)] * (2 * size)
    chunks = sorted(range(2 * size), key=lambda chunk: (loads[order[chunk]], chunk))
    for chunk in chunks[: length % (2 * size)]:
        counts[chunk] += 1
    for rank, count in zip(order, counts):
        loads[rank] += count
    return list(zip(order, counts))


class Split:
    """Division of one row among the ranks of a context parallel group, as arrays on the host."""

    def __init__(self, context: ContextGroup, pieces: list[list[SegmentPiece]]) -> None:
        self._context, self._pieces = context, pieces[context.rank]
        self.places = np.concatenate([_places(own) for own in pieces])
        """int64 [W]: position in the row of each token of the parts, in the order of the ranks."""
        self._order = np.argsort(self.places)
        size = len(self.places) // context.size
        self.part = slice(context.rank * size, (context.rank + 1) * size)

    def cut(self, predict_at: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the positions in this part that predict response tokens, int64 [r], and arrays for `on`.

        predict_at: positions in the row that predict the R response tokens, int64 [R].
        """
        size = self.part.stop - self.part.start
        rank, place = np.divmod(self._order[predict_at], size)
        counts = np.bincount(rank, minlength=self._context.size)
        by_rank = np.argsort(rank, kind="stable")  # the response tokens of each rank, in their order
        self._most, within = int(counts.max()), ranges(np.zeros_like(counts), counts)
        restore = np.empty_like(predict_at)
        restore[by_rank] = rank[by_rank] * self._most + within
        self._own = (rank == self._context.rank).nonzero()[0]
        own = np.array(self._pieces)
        start, length, segment, prompt, prompt_length = own.T
        before = start + length - segment
        starts, lengths = np.stack([prompt, segment], 1).ravel(), np.stack([prompt_length, before], 1).ravel()
        arrays = dict(
            cu_seqlens_q=np.cumsum([0, *length]),
            cu_seqlens_kv=np.cumsum([0, *(prompt_length + before)]),
            kv_index=ranges(starts, lengths),
            order=self._order,
            restore=restore,
        )
        return place[self._own], arrays

    def on(self, arrays: dict[str, Tensor]) -> tuple["RowPart", RowAttention]:
        """Return this part and its attention. arrays: the arrays of `cut`, on the device."""
        runs: list[BlockRun] = []
        prefixes: list[Prefix] = []
        end = 0
        for start, length, segment, prompt, prompt_length in self._pieces:
            runs.append(BlockRun(first := end, 1, length, keys=start))
            end += length
            if prompt_length:
                prefixes.append(Prefix(first, end, prompt, prompt + prompt_length))
            if start > segment:
                prefixes.append(Prefix(first, end, segment, start))
        attention = RowAttention(
            runs=runs,
            prefixes=prefixes,
            cu_seqlens_q=arrays["cu_seqlens_q"].int(),
            cu_seqlens_kv=arrays["cu_seqlens_kv"].int(),
            max_seqlen_q=max(piece.length for piece in self._pieces),
            max_seqlen_kv=max(p.prompt_length + p.start + p.length - p.segment for p in self._pieces),
            kv_index=arrays["kv_index"],
        )
        indices = {name: arrays[name] for name in ("order", "restore")}
        return RowPart(self._context, self, torch.from_numpy(self._own), self._most, **indices), attention


def _places(pieces: list[SegmentPiece]) -> np.ndarray:
    starts, lengths = (np.array([piece[k] for piece in pieces], np.int64) for k in (0, 1))
    return ranges(starts, lengths)


@dataclass
class RowPart:
    """This rank's part of a row, on the device."""

    context: ContextGroup
    split: Split
    own: Tensor
    """int64 [r], ascending, on the CPU: indices of the response tokens, of R, that this part predicts."""
    most: int
    """Maximum of r over the ranks."""
    order: Tensor
    """int64 [W]: index of each token of the row in the concatenated parts."""
    restore: Tensor
    """int64 [R]: index of each response token in the concatenated, padded outputs."""

    @property
    def positions(self) -> np.ndarray:
        """Return the position in the row of each token of this part, int64 [W/cp]."""
        return self.split.places[self.split.part]

    def row(self, x: Tensor) -> Tensor:
        """Return x of the whole row, [W, ...]. x: values at the tokens of this part, [W/cp, ...].

        The gradient of x is summed over the ranks of the group. Both passes are collective over the group.
        """
        return reorder(self.gathered(x), self.order)

    def gathered(self, x: Tensor) -> Tensor:
        """Return x of all ranks, concatenated, [cp n, ...]. x: [n, ...]. Collective, as `row`."""
        return _Gather.apply(x, self.context.group)

    def order_of(self, shards: int) -> Tensor:
        """Return the index of each token of the row, int64 [W], in the tensor that tensor parallel ranks
        gather.

        shards: number of tensor parallel ranks. Each holds an equal piece of every part (sequence
            parallelism) and first gathers the pieces of its context parallel group (`gathered`).
        """
        if shards == 1:
            return self.order
        rank, place = _divmod(self.order, len(self.order) // self.context.size)
        shard, within = _divmod(place, size := len(self.order) // (self.context.size * shards))
        return (shard * self.context.size + rank) * size + within

    def outputs(self, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return outputs at all response tokens, [R, ...] each. found: outputs at the tokens `own`, [r, ...].

        Every rank of the group then computes the same loss, so the gradient of `found` consists of the rows
        `own` of the result's gradient. Collective over the group; the backward pass is not.
        """
        return tuple(_GatherOutputs.apply(x, self) for x in found)


def _divmod(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    return x // by, x % by


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """Return x[order]. order: a permutation, int64 [len(x)]."""
    return _Reorder.apply(x, order)


class _Reorder(torch.autograd.Function):
    """`SelectRows` for a permutation: its backward pass sums nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return grad.index_select(0, inverse), None


class _Gather(torch.autograd.Function):
    """Gathers along the first dimension; the backward pass sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


class _GatherOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: RowPart) -> Tensor:
        ctx.part = part
        padded = x.new_zeros(part.most, *x.shape[1:])
        padded[: len(x)] = x
        whole = x.new_empty(part.context.size * part.most, *x.shape[1:])
        if part.most:  # the same on all ranks of the group
            dist.all_gather_into_tensor(whole, padded, group=part.context.group)
        return whole.index_select(0, part.restore)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, ctx.part.own.to(grad.device)), None
