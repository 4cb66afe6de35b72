"""Layout of a packed row as plain data: which tokens attend to which.

A row is a sequence of segments. A segment is a whole sequence, the prompt of a group of answers, or one of
these answers. Its queries attend causally to its own keys. The queries of an answer also attend to all keys
of its prompt. For example, a prompt with two answers is three segments, and the second answer does not see
the first. `RowAttention` describes this for one row; it is computed once per micro-batch, and
`rl.training.attention` applies it in every layer.

T: tokens of the row. Tk: keys of all segments; a shared prompt counts once per answer.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

MASKED_TOKENS = 128
"""Maximum number of tokens of a group that is computed as one block with a mask. For short groups this costs
less than one call per segment (measured on CPU)."""


@dataclass(frozen=True)
class RowGroup:
    """Adjacent tokens of a row: one sequence, or a prompt and the answers that share it."""

    start: int
    prompt: int
    """Number of tokens of the sequence or prompt."""
    answers: tuple[int, ...] = ()
    """Number of tokens of each answer."""

    @property
    def segments(self) -> tuple[int, ...]:
        """Number of tokens of each segment."""
        return (self.prompt, *self.answers)

    @property
    def starts(self) -> list[int]:
        """Position in the row of each segment's first token."""
        return list(accumulate(self.segments[:-1], initial=self.start))

    @property
    def end(self) -> int:
        """Position in the row after the group."""
        return self.start + sum(self.segments)


@dataclass(frozen=True)
class BlockRun:
    """`count` adjacent blocks of `length` queries each. A query attends to the keys of its own block."""

    start: int
    count: int
    length: int
    mask: Tensor | None = None
    """Float [count, 1, length, length] to add to the scores; None: causal."""
    keys: int | None = None
    """Position of the first key in the row; None: `start`, because the queries are the whole row."""

    @property
    def first_key(self) -> int:
        return self.start if self.keys is None else self.keys


@dataclass(frozen=True)
class Prefix:
    """Queries [start, end), which also attend to the keys [first, last)."""

    start: int
    end: int
    first: int
    last: int
    mask: Tensor | None = None
    """Float [1, 1, end - start, last - first] to add to the scores."""


@dataclass
class RowAttention:
    """Tokens to which each token of a row attends.

    On the CPU, attention reads `runs` and `prefixes`. On CUDA it reads the other fields, or only `runs` with
    float32.

    Queries are the tokens of the row, or of one part of it (`rl.training.context_parallel`); keys are always
    the tokens of the whole row.
    """

    runs: list[BlockRun]
    """Blocks that cover the queries."""
    prefixes: list[Prefix]
    """Answers, which also attend to their prompt, and chunks of a segment, which attend to its beginning."""
    cu_seqlens_q: Tensor
    """int32 [segments + 1]: bounds of the segments among the queries."""
    cu_seqlens_kv: Tensor
    """int32 [segments + 1]: bounds of the segments' keys among all keys."""
    max_seqlen_q: int
    max_seqlen_kv: int
    kv_index: Tensor | None
    """int64 [Tk]: position in the row of each key; None if key i is token i."""


def row_attention(groups: list[RowGroup], keys: dict[str, Tensor], device: torch.device) -> RowAttention:
    """Return the attention of a row of adjacent groups. keys: `segments(groups)` on the device."""
    runs: list[BlockRun] = []
    prefixes: list[Prefix] = []
    for masked_tokens, same in groupby(groups, lambda group: _masked_tokens(group, device)):
        adjacent = list(same)
        start = adjacent[0].start
        if masked_tokens:
            runs.append(BlockRun(start, len(adjacent), masked_tokens, _masks(adjacent)))
            continue
        for length, equal in groupby(n for group in adjacent for n in group.segments):
            runs.append(BlockRun(start, count := len(list(equal)), length))
            start += count * length
        prefixes += [
            Prefix(first := group.start + group.prompt, group.end, group.start, first)
            for group in adjacent
            if group.answers
        ]
    has_shared = any(group.answers for group in groups)
    lengths = [(n, n + group.prompt * (k > 0)) for group in groups for k, n in enumerate(group.segments)]
    return RowAttention(
        runs=runs,
        prefixes=prefixes,
        cu_seqlens_q=keys["cu_seqlens_q"].int(),
        cu_seqlens_kv=keys["cu_seqlens_kv"].int(),
        max_seqlen_q=max(n for n, _ in lengths),
        max_seqlen_kv=max(n for _, n in lengths),
        kv_index=keys["kv_index"] if has_shared else None,
    )


def windowed(row: RowAttention, query: Tensor, key: Tensor, window: int) -> RowAttention:
    """Return the attention of a row with a window: a token sees itself and the window - 1 tokens before.

    Only the masks of `runs` and `prefixes` differ from `row`. query, key: position of each query and of each
    key in its sequence, int64 [T].
    """

    def mask(q: Tensor, k: Tensor, causal: bool) -> Tensor:
        far = q[:, :, None] - k[:, None, :] >= window
        if causal:
            far |= torch.ones_like(far).triu(1)
        return torch.zeros(far.shape, device=far.device).masked_fill_(far, float("-inf"))[:, None]

    runs, prefixes = [], []
    for run in row.runs:
        size, shape = run.count * run.length, (run.count, run.length)
        q, k = (x[at : at + size].view(shape) for x, at in ((query, run.start), (key, run.first_key)))
        more = mask(q, k, run.mask is None)
        runs.append(replace(run, mask=more if run.mask is None else more + run.mask))
    for part in row.prefixes:
        near = mask(query[None, part.start : part.end], key[None, part.first : part.last], False)
        prefixes.append(replace(part, mask=near))
    return replace(row, runs=runs, prefixes=prefixes)


def _masked_tokens(group: RowGroup, device: torch.device) -> int:
    """Return the group's number of tokens if it is computed as one block with a mask, else 0."""
    length = group.end - group.start
    return length if group.answers and length <= MASKED_TOKENS and device.type == "cpu" else 0


def _masks(groups: list[RowGroup]) -> Tensor:
    """Return the masks of groups of equal length L, float [groups, 1, L, L]: 0, or -inf at unseen keys."""
    part = np.stack([np.arange(len(g.segments)).repeat(g.segments) for g in groups])  # 0: prompt
    query, key = part[:, :, None], part[:, None, :]
    seen = np.tril((query == key) | (key == 0))
    return torch.zeros(seen.shape).masked_fill_(torch.from_numpy(~seen), float("-inf"))[:, None]


def segments(groups: list[RowGroup]) -> dict[str, np.ndarray]:
    """Return the integer arrays of `RowAttention`; `kv_index` is empty if no prompt is shared."""
    start, length, prompt_start, prompt = (
        np.array(column, np.int64)
        for column in zip(
            *(
                (start, length, group.start, group.prompt * (k > 0))
                for group in groups
                for k, (start, length) in enumerate(zip(group.starts, group.segments))
            )
        )
    )
    index = ranges(np.stack([prompt_start, start], 1).ravel(), np.stack([prompt, length], 1).ravel())
    return dict(
        cu_seqlens_q=np.cumsum([0, *length]),
        cu_seqlens_kv=np.cumsum([0, *(prompt + length)]),
        kv_index=index if prompt.any() else index[:0],
    )


def positions(groups: list[RowGroup]) -> np.ndarray:
    """Return the position in its sequence of each token of the row, int64 [T]."""
    first = [group.prompt * (k > 0) for group in groups for k in range(len(group.segments))]
    return ranges(np.array(first), np.array([n for group in groups for n in group.segments]))


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenation of the ranges start, start + 1, ..., start + length - 1, int64."""
    ends = lengths.cumsum()
    return np.arange(lengths.sum()) + (starts - (ends - lengths)).repeat(lengths)


class SelectRows(torch.autograd.Function):
    """`x.index_select(0, index)`, with a gradient that is the same in every run on a GPU too.

    torch adds the gradients of an element that was selected several times, such as a shared prompt's keys, by
    atomic operations in the dtype of x. The order of atomic operations is undefined, and each sum is rounded.
    Here the gradients are added in float32, in the order of the index.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return _sum_rows(grad, index, ctx.num_rows), None


class SumRows(torch.autograd.Function):
    """`zeros(num_rows, ...).index_add(0, index, x)`, the same in every run on a GPU too (`SelectRows`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index)
        return _sum_rows(x, index, num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


def _sum_rows(x: Tensor, index: Tensor, num_rows: int) -> Tensor:
    index, order = index.sort(stable=True)
    bounds = torch.searchsorted(index, torch.arange(num_rows + 1, device=index.device))
    parts = x.index_select(0, order).float()
    # unsafe: without a check that would wait for the GPU
    summed = torch.segment_reduce(parts, "sum", offsets=bounds, axis=0, unsafe=True, initial=0)
    return summed.to(x.dtype)


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the elements `index`, int64 [n], of the first dimension of x (`SelectRows`)."""
    return SelectRows.apply(x, index) if x.is_cuda else x.index_select(0, index)
