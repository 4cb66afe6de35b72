"""Packed micro-batches: the layout of several samples in one row of tokens on the device."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from rl.data.batch import Batch
from rl.training.extras import Extras
from rl.training.rows import RowAttention, RowGroup, positions, ranges, row_attention, segments

if TYPE_CHECKING:
    from rl.training.context_parallel import ContextGroup, RowPart


@dataclass
class MicroBatch:
    """One packed row of T tokens on the device: B samples with R response tokens in total.

    The row holds the samples' sequences, shortest first, then padding. Columns and the outputs of the forward
    pass are [R] in the order of the samples. `predict_at` are the positions of the row that predict the R
    response tokens; `targets` are the R tokens themselves. For example, the first response token after a
    prompt of 5 tokens is predicted at position 4 of its sequence.

    With context parallelism T is the number of tokens of this rank's part of the row, and `predict_at` has
    only the r positions that are in this part.
    """

    samples: list[int]
    """Indices of the samples in the batch, [B]."""
    tokens: Tensor
    """int64 [1, T]."""
    position_ids: Tensor
    """int64 [1, T], restarting at 0 in each sequence; [3, T] in a row with images (`rl.models.rope.axes`)."""
    bounds: Tensor
    """int32 [2]: 0 and T."""
    attention: RowAttention
    predict_at: Tensor
    """int64 [R]."""
    targets: Tensor
    """int64 [R]."""
    lengths: Tensor
    """int64 [B], number of response tokens of each sample."""
    column_index: Tensor
    """int64 [R] on the CPU: indices of the targets in the batch's token columns."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """The batch's token columns at the targets, float32 [R] each."""
    sample_columns: dict[str, Tensor] = field(default_factory=dict)
    """The batch's sample columns that losses read, for example `labels`, float32 [B] each."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """The model's outputs at the targets, by name, [R, ...] each. The forward pass fills them on the last
    stage."""
    extras: Extras = Extras()
    """Objects that optional features add to the row, found by their class."""
    starts: np.ndarray | None = None
    """int64 [2, B]: positions in the row of each sample's first token, and of its first response token."""
    part: "RowPart | None" = None
    """This rank's part of the row, if context parallel ranks share it."""
    groups: list[RowGroup] = field(default_factory=list)
    """The groups of the whole row, including its padding."""

    def column(self, name: str) -> Tensor:
        """Return a token column, float32 [R], or a sample column, float32 [B].

        Raises ValueError if the column is not filled.
        """
        columns = self.columns | self.sample_columns
        if name not in columns:
            raise ValueError(
                f"this micro-batch has no {name}; its columns are {', '.join(columns) or 'none'}"
            )
        return columns[name]

    def named(self, name: str) -> Tensor | None:
        """Return the column or output of this name, or `lengths`; None if there is none."""
        known = {"lengths": self.lengths, **self.columns, **self.sample_columns, **self.outputs}
        return known.get(name)

    @property
    def mask(self) -> Tensor:
        """The column `mask`."""
        return self.column("mask")

    def output(self, name: str) -> Tensor:
        """Return an output, [R, ...]. Raises ValueError if the pass did not compute it (`Loss.reads`)."""
        if name not in self.outputs:
            computed = ", ".join(self.outputs) or "none"
            raise ValueError(
                f"this pass did not compute {name}, only {computed}; name it in the loss's reads"
            )
        return self.outputs[name]

    @property
    def logprobs(self) -> Tensor:
        """Log-prob of each target by a policy, float32 [R]."""
        return self.output("logprobs")

    @property
    def entropy(self) -> Tensor:
        """Entropy of a policy's distribution at each token, float32 [R]."""
        return self.output("entropy")

    @property
    def values(self) -> Tensor:
        """Output of a value model, float32 [R]."""
        return self.output("values")


def pack(
    batch: Batch, samples: list[int], *, multiple: int, device: torch.device, share: bool = False
) -> MicroBatch:
    """Return the samples as one row, with their columns; arguments as for `lay_out`."""
    return with_columns(lay_out(batch, samples, multiple=multiple, device=device, share=share), batch)


def with_columns(row: MicroBatch, batch: Batch) -> MicroBatch:
    """Return a copy of the micro-batch with the current columns of its batch."""
    host = {name: column[row.column_index] for name, column in batch.loss_columns().items()}
    per_sample = {name: column[row.samples] for name, column in batch.loss_sample_columns().items()}
    host |= per_sample
    columns = dict(zip(host, to_device([x.numpy() for x in host.values()], torch.float32, row.tokens.device)))
    per_sample = {name: columns.pop(name) for name in per_sample}
    return replace(row, columns=columns, sample_columns=per_sample, outputs={})


_LAYOUTS: WeakKeyDictionary[Batch, dict] = WeakKeyDictionary()
"""Layouts of the micro-batches of each batch, by the arguments of `lay_out`."""


def lay_out(
    batch: Batch,
    samples: list[int],
    *,
    multiple: int,
    device: torch.device,
    share: bool = False,
    context: "ContextGroup | None" = None,
) -> MicroBatch:
    """Return the micro-batch without columns.

    multiple: the row, or each part of it, is padded to a multiple of this number (tp under sequence
    parallelism, else 1). share: adjacent samples of one group with equal prompts share one copy of the
    prompt. context: the ranks that share the row with this one; None: this rank holds all of it.

    The layout is cached as long as the batch lives, because several passes over a batch use the same plan.
    """
    layouts, key = _LAYOUTS.setdefault(batch, {}), (tuple(samples), multiple, device, share, context)
    if key not in layouts:
        layouts[key] = _lay_out(batch, samples, multiple, device, share, context)
    return layouts[key]


def _lay_out(
    batch: Batch,
    samples: list[int],
    multiple: int,
    device: torch.device,
    share: bool,
    context: "ContextGroup | None",
) -> MicroBatch:
    prompts, responses = (x.numpy()[samples] for x in (batch.prompt_lengths, batch.lengths))
    groups: list[RowGroup] = []
    pieces = [np.zeros(0, np.int32)]
    # Positions in the row of the token before each response, and of the response's first token.
    before, first = np.zeros(len(samples), np.int64), np.zeros(len(samples), np.int64)
    end = 0
    for members in _units(batch, samples, share, prompts, responses):
        start, prompt = end, int(prompts[members[0]])
        pieces.append(batch.prompt_ids[samples[members[0]]])
        end += prompt
        for k in sorted(members, key=lambda k: responses[k]):
            before[k], first[k] = start + prompt - 1, end
            pieces.append(batch.response_ids[samples[k]])
            end += int(responses[k])
        if len(members) == 1:
            groups.append(RowGroup(start, end - start))
        else:
            groups.append(RowGroup(start, prompt, tuple(sorted(int(n) for n in responses[members] if n))))
    split = None if context is None else context.split(groups, multiple=multiple)
    length = -(-max(end, 1) // multiple) * multiple if split is None else len(split.places)
    if length > end:
        groups.append(RowGroup(end, length - end))
        pieces.append(np.zeros(length - end, np.int32))
    within = ranges(np.zeros_like(responses), responses)
    arrays = dict(
        tokens=np.concatenate(pieces)[None],
        position_ids=positions(groups)[None],
        predict_at=np.where(within > 0, first.repeat(responses) + within - 1, before.repeat(responses)),
        targets=np.concatenate([pieces[0], *(batch.response_ids[i] for i in samples)]),
        lengths=responses,
        bounds=np.array([0, length]),
    )
    if split is None:
        keys = segments(groups)
    else:
        own = split.places[split.part]
        arrays["predict_at"], keys = split.cut(arrays["predict_at"])
        arrays |= {name: arrays[name][:, own] for name in ("tokens", "position_ids")}
        arrays["bounds"] = np.array([0, len(own)])
    on_device = dict(
        zip([*arrays, *keys], to_device([*arrays.values(), *keys.values()], torch.int64, device))
    )
    at = {name: on_device.pop(name) for name in keys}
    part, attention = (None, row_attention(groups, at, device)) if split is None else split.on(at)
    return MicroBatch(
        samples=samples,
        tokens=on_device["tokens"],
        position_ids=on_device["position_ids"],
        bounds=on_device["bounds"].int(),
        attention=attention,
        predict_at=on_device["predict_at"],
        targets=on_device["targets"],
        lengths=on_device["lengths"],
        part=part,
        groups=groups,
        column_index=torch.from_numpy(ranges(batch.offsets.numpy()[samples], responses)),
        starts=np.stack([before + 1 - prompts, first]),
    )


def _units(
    batch: Batch, samples: list[int], share: bool, prompts: np.ndarray, responses: np.ndarray
) -> list[list[int]]:
    """Return units as indices into `samples`: groups that share a prompt, or single samples.

    Units are ordered by length, so that units of equal length are adjacent in the row.
    """
    units: list[list[int]] = []
    groups = batch.groups.numpy()[samples]
    for k, i in enumerate(samples):
        if share and k and groups[k] == groups[k - 1]:
            prompt, previous = batch.prompt_ids[i], batch.prompt_ids[samples[k - 1]]
            if prompt is previous or np.array_equal(prompt, previous):
                units[-1].append(k)
                continue
        units.append([k])
    return sorted(units, key=lambda unit: (len(unit) > 1, prompts[unit[0]] + responses[unit].sum()))


def to_device(arrays: list[np.ndarray], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return the arrays on the device, in their shapes, with one transfer that does not block the host."""
    sizes = [array.size for array in arrays]
    host = torch.empty(sum(sizes), dtype=dtype, pin_memory=device.type == "cuda")
    for part, array in zip(host.split(sizes), arrays):
        part.copy_(torch.from_numpy(array).flatten())
    parts = host.to(device, non_blocking=True).split(sizes)
    return [part.view(array.shape) for part, array in zip(parts, arrays)]
