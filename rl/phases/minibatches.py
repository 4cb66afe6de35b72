"""Mini-batches of a step: which samples each optimizer step reads, and how they lie in micro-batches."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.objectives.preference import counted
from rl.objectives.segments import segment_sum
from rl.training.dp_split import MicroBatches, plan_minibatch
from rl.training.loss import Totals


@dataclass(frozen=True)
class MinibatchPlan:
    """The samples of one optimizer step. Plain data, computed identically on every rank."""

    micro_batches: list[MicroBatches]
    """The micro-batches of each data parallel rank, [dp]."""

    @property
    def samples(self) -> list[int]:
        """Indices of the samples in the batch, ascending."""
        return sorted(i for rank in self.micro_batches for micro in rank for i in micro)

    def totals(self, batch: Batch) -> Totals:
        """Return the loss denominators of the mini-batch, from the batch's current mask."""
        samples = self.samples
        num_tokens = segment_sum(batch.mask, batch.lengths)[samples].sum()
        num_samples = counted(batch.mask, batch.lengths)[samples].sum()
        num_units = (
            counted(batch.mask, batch.lengths, unit=batch.samples_per_unit)[samples].sum()
            / batch.samples_per_unit
        )
        return Totals(
            num_tokens=max(float(num_tokens), 1.0),
            num_samples=max(float(num_samples), 1.0),
            num_units=max(float(num_units), 1.0),
        )


class MinibatchPlanner:
    """Plans the mini-batches of a batch once, so that every pass over the batch uses the same packing.

    Log-probs before the first update are then bitwise equal to those within it.
    """

    def __init__(self, config: Config, dp: int):
        self._prompts_per_minibatch = config.training.prompts_per_minibatch or config.data.prompts_per_step
        self._max_tokens, self._dp = config.training.micro_batch_tokens, dp
        self._batch: Callable[[], Batch | None] = lambda: None
        """Weak reference to the batch that was planned last; its columns are freed with the step."""
        self._plans: list[MinibatchPlan] = []

    def plans(self, batch: Batch) -> list[MinibatchPlan]:
        """Return one plan per mini-batch, in the order of the optimizer steps."""
        if self._batch() is not batch:
            self._batch, self._plans = weakref.ref(batch), self._plan(batch)
        return self._plans

    def _plan(self, batch: Batch) -> list[MinibatchPlan]:
        num_groups = int(batch.groups.max()) + 1
        # Groups are divided evenly, so that no update is computed from a small remainder.
        num_minibatches = -(-num_groups // self._prompts_per_minibatch)
        minibatch_of = (batch.groups * num_minibatches).div(num_groups, rounding_mode="floor")
        members = [(minibatch_of == k).nonzero().squeeze(1).tolist() for k in range(num_minibatches)]
        return [
            MinibatchPlan(plan_minibatch(batch, samples, dp=self._dp, max_tokens=self._max_tokens))
            for samples in members
        ]
