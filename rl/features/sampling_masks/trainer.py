"""Sampling masks: the sets of tokens that the engine sampled from, after rollout.top_p, top_k and min_p.

R: response tokens of a micro-batch. The trainer's distributions are renormalised over these sets, as the
engine's were when it sampled. For example, if the engine sampled from two tokens only, the trainer's
probabilities of these two are divided by their sum.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rl.config.run_models import RunModel
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.held import SAMPLING_MASKS
from rl.training.extras import LogitsFilter
from rl.training.logprobs import FLOOR
from rl.training.packing import MicroBatch
from rl.training.parts import TrainerPart
from rl.training.rows import ranges

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine


@dataclass(frozen=True)
class SamplingMasks(LogitsFilter):
    """The sets of R positions, on the host."""

    ids: np.ndarray
    """Token ids of all sets, one set after the other, integers [K]."""
    counts: np.ndarray
    """int64 [R]: sizes of the sets. 0: the position has the whole vocabulary."""

    def of(self, index: Tensor) -> "SamplingMasks":
        ends, own = self.counts.cumsum(), index.numpy()
        counts = self.counts[own]
        return SamplingMasks(self.ids[ranges(ends[own] - counts, counts)], counts)

    def check(self, targets: np.ndarray) -> None:
        """Raise RuntimeError if a target, [R], is not in its set."""
        hits = np.zeros(len(self.ids) + 1, np.int64)
        np.cumsum(self.ids == targets.repeat(self.counts), out=hits[1:])
        ends = self.counts.cumsum()
        missing = (self.counts > 0) & (hits[ends] == hits[ends - self.counts])
        if missing.any():
            first = int(missing.argmax())
            raise RuntimeError(
                f"{missing.sum()} of {len(targets)} tokens are not in the set that the engine sampled them "
                f"from, first token {targets[first]} at position {first} of its micro-batch: sampling masks "
                "and tokens of different samples were combined."
            )

    def on_rows(self, first: int, rows: int, device: torch.device) -> "LocalMasks":
        """Return the part of the sets on the rows first to first + rows - 1 of the head."""
        position = np.arange(len(self.counts)).repeat(self.counts)
        row = self.ids.astype(np.int64) - first
        mine = (row >= 0) & (row < rows)
        ends = np.zeros(len(self.counts) + 1, np.int64)
        np.cumsum(np.bincount(position[mine], minlength=len(self.counts)), out=ends[1:])
        index, cut = (
            torch.from_numpy(array).pin_memory() if device.type == "cuda" else torch.from_numpy(array)
            for array in (position[mine] * rows + row[mine], self.counts > 0)
        )
        return LocalMasks(
            index.to(device, non_blocking=True), cut.to(device, non_blocking=True), ends.tolist(), rows
        )


class MaskedSampling(TrainerPart):
    """Renormalises a policy's distributions over the sets that its tokens were sampled from."""

    logits_filter = SamplingMasks

    def attach(self, engine: "TrainingEngine") -> None:
        """Only the last stage, which computes the head, needs the sets."""
        last = engine.grid.pp - 1
        self.needs = dict.fromkeys(SAMPLING_MASKS, lambda stage: slice(None) if stage == last else None)

    def micro_batch(self, batch: Batch, micro: MicroBatch) -> None:
        """Give the micro-batch the sets of its tokens, unless no engine sampled the batch."""
        if batch.expects_held:
            micro.extras = micro.extras.plus(masks_of(batch, micro.samples))


def masks_of(batch: Batch, samples: list[int]) -> SamplingMasks:
    """Return the sampling masks of the samples' response tokens. Tokens that were given have no set.

    Raises RuntimeError if a token is not in its set.
    """
    ids, sizes = (batch.held[name].of(samples) for name in SAMPLING_MASKS)
    counts = np.zeros(int(batch.lengths[samples].sum()), np.int64)
    sampled = slice(None) if batch.turns is None else batch.turns[batch.tokens_of(samples)].numpy() > 0
    counts[sampled] = sizes
    masks = SamplingMasks(ids, counts)
    masks.check(np.concatenate([np.zeros(0, np.int32), *(batch.response_ids[i] for i in samples)]))
    return masks


@dataclass(frozen=True)
class LocalMasks:
    """The sets of R positions on one rank's rows of the head, on the device."""

    index: Tensor
    """int64 [K]: position * rows + row of each token of the sets on this rank, by position."""
    is_cut: Tensor
    """bool [R]: whether the position has a set."""
    ends: list[int]
    """Number of entries of `index` before each position, [R + 1]."""
    rows: int

    def restrict(self, logits: Tensor, part: slice) -> None:
        """Set the logits [c, rows] of the positions in `part` to FLOOR outside of their sets, in place."""
        stop = min(part.stop, len(self.is_cut))
        index = self.index[self.ends[part.start] : self.ends[stop]] - part.start * self.rows
        flat = logits.view(-1)
        inside = flat.index_select(0, index)
        logits.masked_fill_(self.is_cut[part, None], FLOOR)
        flat.index_copy_(0, index, inside)


def parts(config: Config, model: RunModel, base_of: "TrainingEngine | None") -> list[TrainerPart]:
    """Return the parts of a model in training."""
    return [MaskedSampling()] if model.name == "policy" or model.is_teacher else []
