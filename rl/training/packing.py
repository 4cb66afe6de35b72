"""Packed micro-batches: the layout of several samples in one row of tokens on the device."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rl.data.batch import Batch


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
