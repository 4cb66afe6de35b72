"""Samples in micro-batches: which rank processes which sample, and the layout of a packed row of tokens.

The plan is plain data that every rank computes identically from the lengths alone. All forward passes of a
step use the same plan. The log-probs before and in the first update therefore come from the same packed rows
and are bitwise equal.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rl.data.batch import Batch

MicroBatches = list[list[int]]
"""Sample indices of each micro-batch of one data parallel rank; an empty one holds only padding."""
MicroBatchPlan = list[MicroBatches]
"""The micro-batches of each data parallel rank, [dp]."""


def plan_micro_batches(
    lengths: list[int], *, indices: list[int], dp: int, max_tokens: int, samples_per_unit: int = 1
) -> MicroBatchPlan:
    """Return the micro-batches of each of `dp` ranks for the samples `indices`.

    lengths: tokens of each sample, prompt included. samples_per_unit: number of consecutive samples kept in
    one micro-batch, in order; `indices` must contain whole units.

    Samples are assigned longest first, each to the rank with the fewest tokens so far. A rank's samples form
    as few micro-batches of at most `max_tokens` as first-fit gives. Every rank has the same number of
    micro-batches, which pipeline and expert parallel schedules require.
    """
    if samples_per_unit > 1:
        size = samples_per_unit
        units = sorted({i // size for i in indices})
        assert len(units) * size == len(indices), "a mini-batch holds whole units"
        totals = [sum(lengths[k * size : (k + 1) * size]) for k in range(len(lengths) // size)]
        plan = plan_micro_batches(totals, indices=units, dp=dp, max_tokens=max_tokens)
        return [
            [[i for k in micro for i in range(k * size, (k + 1) * size)] for micro in rank] for rank in plan
        ]
    longest_first = sorted(indices, key=lambda i: (-lengths[i], i))
    ranks = _spread(longest_first, lengths, dp)
    count = max(len(_first_fit(samples, lengths, max_tokens)) for samples in ranks)
    # An even distribution over `count` micro-batches may exceed max_tokens where first-fit does not.
    return [_even_or_first_fit(samples, lengths, count, max_tokens) for samples in ranks]


def plan_minibatch(batch: Batch, samples: list[int], *, dp: int, max_tokens: int) -> MicroBatchPlan:
    """Return `plan_micro_batches` for these samples of a batch."""
    lengths, size = (batch.prompt_lengths + batch.lengths).tolist(), batch.samples_per_unit
    return plan_micro_batches(lengths, indices=samples, dp=dp, max_tokens=max_tokens, samples_per_unit=size)


def _spread(longest_first, lengths, bins):
    """Assign samples greedily to bins of about equal tokens; ties go to the bin with fewer samples."""
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
        b = next((b for b, free in enumerate(room) if lengths[i] <= free), len(bins))
        if b == len(bins):
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
    """One packed row of T tokens on the device: B samples with R response tokens in total.

    Position t of the row predicts the token at t + 1. `predict_at` are the R positions whose next token is a
    response token, `targets` those tokens. Columns and the outputs of the forward pass are [R] in the same
    order.
    """

    samples: list[int]
    """Indices of the samples in the batch, [B]."""
    tokens: Tensor
    """int64 [1, T]."""
    position_ids: Tensor
    """int64 [1, T], restarting at 0 in each sequence."""
    cu_seqlens: Tensor
    """int32 [B + 1], or [B + 2] if the last sequence is padding."""
    max_seqlen: int
    predict_at: Tensor
    """int64 [R]."""
    targets: Tensor
    """int64 [R]."""
    lengths: Tensor
    """int64 [B], number of response tokens of each sample."""
    column_index: Tensor
    """int64 [R] on the CPU: indices of these tokens in the batch's token columns."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """The batch's token columns at these tokens, float32 [R] each."""
    labels: Tensor | None = None
    """The batch's labels of these samples, float32 [B]."""
    logprobs: Tensor | None = None
    """Output of a policy, float32 [R], as are entropy and sum_p_squared."""
    entropy: Tensor | None = None
    sum_p_squared: Tensor | None = None
    values: Tensor | None = None
    """Output of a value model, float32 [R]."""

    def __getattr__(self, name: str) -> Tensor:
        """Return a column: `micro.advantages` is `micro.columns["advantages"]`."""
        columns = self.__dict__.get("columns", {})
        if name in columns:
            return columns[name]
        raise AttributeError(
            f"this micro-batch has no {name}; its columns are {', '.join(columns) or 'none'}"
        )


def pack(batch: Batch, samples: list[int], *, multiple: int, device: torch.device) -> MicroBatch:
    """Concatenate the samples and pad the row to a multiple of `multiple` tokens.

    multiple: tp under sequence parallelism, else 1.
    """
    offsets = batch.offsets
    sequences = [np.concatenate([batch.prompt_ids[i], batch.response_ids[i]]) for i in samples]
    lengths = [len(sequence) for sequence in sequences]
    padding = -sum(lengths) % multiple or (multiple if not lengths else 0)
    if padding:
        sequences.append(np.zeros(padding, np.int32))
    ends = np.cumsum([0] + [len(sequence) for sequence in sequences])
    predict_at, targets, column_index = ([np.zeros(0, np.int64)] for _ in range(3))
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
