"""Samples into micro-batches: which rank takes which sample, and how samples lie in a packed row of tokens.

The plan is plain data computed alike on every rank from the lengths alone. The same plan serves every forward pass of a
step, so that the log-probs before and in the first update come from the same packed rows and are equal to the bit.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rl.data.batch import Batch

MicroBatches = list[list[int]]
"""Sample indices of each micro-batch of one data parallel rank. An empty one is allowed: it holds only padding."""


def plan_micro_batches(
    lengths: list[int], *, indices: list[int], dp: int, max_tokens: int, unit: int = 1
) -> list[MicroBatches]:
    """Micro-batches of each of `dp` ranks for the samples `indices`; `lengths[i]` are tokens of sample i, prompt included.

    `unit`: samples k * unit .. (k + 1) * unit - 1 stay together and in order; `indices` must hold whole units.

    Samples go to the rank with the fewest tokens so far, longest first; a rank's samples into as few micro-batches of at
    most `max_tokens` as first-fit gives. Every rank has the same number of micro-batches: pipeline and expert parallel
    schedules need that.
    """
    if unit > 1:
        units = sorted({i // unit for i in indices})
        assert len(units) * unit == len(indices), "a mini-batch holds whole units"
        totals = [sum(lengths[k * unit : (k + 1) * unit]) for k in range(len(lengths) // unit)]
        plan = plan_micro_batches(totals, indices=units, dp=dp, max_tokens=max_tokens)
        return [
            [[i for k in micro for i in range(k * unit, (k + 1) * unit)] for micro in rank] for rank in plan
        ]
    longest_first = sorted(indices, key=lambda i: (-lengths[i], i))
    ranks = _spread(longest_first, lengths, dp)
    count = max(len(_first_fit(samples, lengths, max_tokens)) for samples in ranks)
    # Spreading evenly over `count` may overfill one that first-fit would not: then first-fit it is, with empty ones.
    return [_even_or_first_fit(samples, lengths, count, max_tokens) for samples in ranks]


def plan_minibatch(batch: Batch, samples: list[int], *, dp: int, max_tokens: int) -> list[MicroBatches]:
    """`plan_micro_batches` of these samples of a batch."""
    lengths = (batch.prompt_lengths + batch.lengths).tolist()
    return plan_micro_batches(lengths, indices=samples, dp=dp, max_tokens=max_tokens, unit=batch.unit)


def _spread(longest_first, lengths, bins):
    """Greedy longest-first partition into bins of about equal tokens; ties go to the bin with fewer samples."""
    loads, out = [(0, 0, b) for b in range(bins)], [[] for _ in range(bins)]
    for i in longest_first:
        tokens, count, b = min(loads)
        out[b].append(i)
        loads[b] = (tokens + lengths[i], count + 1, b)
    return out


def _first_fit(longest_first, lengths, max_tokens):
    bins: list[list[int]] = []
    room: list[int] = []
    for i in longest_first:
        for b, free in enumerate(room):
            if lengths[i] <= free:
                break
        else:
            b = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins


def _even_or_first_fit(longest_first, lengths, count, max_tokens):
    even = _spread(longest_first, lengths, count)
    fits = all(sum(lengths[i] for i in b) <= max_tokens or len(b) == 1 for b in even)
    chosen = even if fits else _first_fit(longest_first, lengths, max_tokens)
    return [sorted(b) for b in chosen] + [[] for _ in range(count - len(chosen))]


@dataclass
class MicroBatch:
    """One packed row of T tokens on the device. B samples, R response tokens in all.

    Position t of the row predicts the token at t + 1; `predict_at` are the R positions whose next token is a response
    token, `targets` those tokens. Columns and `logprobs`, `entropy` of the forward pass are [R] in the same order.
    """

    samples: list[int]
    """Indices of the samples in the batch, [B]."""
    tokens: Tensor
    """int64 [1, T]."""
    position_ids: Tensor
    """int64 [1, T], restarting at 0 in each sequence."""
    cu_seqlens: Tensor
    """int32 [B + 1], or [B + 2] with a last sequence of padding."""
    max_seqlen: int
    predict_at: Tensor
    """int64 [R]."""
    targets: Tensor
    """int64 [R]."""
    lengths: Tensor
    """int64 [B], response tokens of each sample."""
    column_index: Tensor
    """int64 [R] on the CPU: where these tokens lie in the batch's token columns."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """The batch's token columns at these tokens, float32 [R] each."""
    labels: Tensor | None = None
    """The batch's labels of these samples, float32 [B]."""
    logprobs: Tensor | None = None
    """What the forward pass gave, float32 [R] each: log-probs and entropy of the policy,"""
    entropy: Tensor | None = None
    sum_p_squared: Tensor | None = None
    values: Tensor | None = None
    """or values of the critic."""

    def __getattr__(self, name: str) -> Tensor:
        """`micro.advantages` is `micro.columns["advantages"]`."""
        columns = self.__dict__.get("columns", {})
        if name in columns:
            return columns[name]
        raise AttributeError(
            f"this micro-batch has no {name}; its columns are {', '.join(columns) or 'none'}"
        )


def pack(batch: Batch, samples: list[int], *, multiple: int, device: torch.device) -> MicroBatch:
    """Lay the samples end to end, then padding to a multiple of `multiple` tokens (sequence parallelism: tp)."""
    offsets = batch.offsets
    sequences = [np.concatenate([batch.prompt_ids[i], batch.response_ids[i]]) for i in samples]
    lengths = [len(sequence) for sequence in sequences]
    padding = -sum(lengths) % multiple or (multiple if not lengths else 0)
    if padding:
        sequences.append(np.zeros(padding, np.int32))
    ends = np.cumsum([0] + [len(sequence) for sequence in sequences])
    predict_at, targets, column_index = (
        [np.zeros(0, np.int64)],
        [np.zeros(0, np.int64)],
        [np.zeros(0, np.int64)],
    )
    for i, start in zip(samples, ends):
        prompt, response = len(batch.prompt_ids[i]), len(batch.response_ids[i])
        predict_at.append(start + prompt - 1 + np.arange(response))
        targets.append(batch.response_ids[i].astype(np.int64))
        column_index.append(int(offsets[i]) + np.arange(response))
    index = torch.from_numpy(np.concatenate(column_index))

    def on_device(parts, dtype):
        return torch.from_numpy(np.concatenate(parts)).to(device=device, dtype=dtype)

    return MicroBatch(
        samples=samples,
        tokens=on_device(sequences, torch.int64)[None],
        position_ids=on_device([np.arange(len(sequence)) for sequence in sequences], torch.int64)[None],
        cu_seqlens=torch.from_numpy(ends).to(device=device, dtype=torch.int32),
        max_seqlen=max(len(sequence) for sequence in sequences),
        predict_at=on_device(predict_at, torch.int64),
        targets=on_device(targets, torch.int64),
        lengths=batch.lengths[samples].to(device),
        column_index=index,
        columns={name: column[index].to(device) for name, column in batch.loss_columns().items()},
        labels=None if batch.labels is None else batch.labels[samples].to(device),
    )
