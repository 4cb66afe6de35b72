"""Mini-batches of a step: the samples of each optimizer step, and their division into micro-batches."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.objectives.segments import segment_sum
from rl.training.loss import Totals
from rl.training.micro_batch_plans import (
    Cost,
    MicroBatches,
    MicroBatchPlan,
    Workload,
    next_multiple,
    plan_micro_batches,
    samples_of,
)

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine


@dataclass(frozen=True)
class MinibatchPlan:
    """The samples of one optimizer step. Plain data, computed identically on every rank."""

    micro_batches: list[MicroBatches]
    """The micro-batches of each data parallel rank, [dp]."""
    costs: list[list[int]] | None = None
    """Estimated cost (`rl.training.micro_batch_plans.Cost`) by data parallel rank and micro-batch."""

    @cached_property
    def samples(self) -> list[int]:
        """Indices of the samples in the batch, ascending."""
        return samples_of(self.micro_batches)

    def totals(self, batch: Batch) -> Totals:
        """Return the loss denominators of the mini-batch, from the batch's current mask.

        `num_samples` counts trajectories, each with one or more rows.
        """
        samples = self.samples
        mask = batch.mask[batch.tokens_of(samples)]
        tokens = segment_sum(mask.double(), batch.lengths[samples])
        if batch.trajectories is not None:  # all rows of a trajectory are in one mini-batch
            rows = torch.unique_consecutive(batch.trajectories[samples], return_counts=True)[1]
            tokens = segment_sum(tokens, rows)
        counted = tokens > 0
        return Totals(
            num_tokens=max(float(tokens.sum()), 1.0),
            num_samples=max(float(counted.sum()), 1.0),
            num_units=max(float(counted.view(-1, batch.samples_per_unit).all(1).sum()), 1.0),
        )


def samples_by_rank(plans: list[MinibatchPlan]) -> list[list[int]]:
    """Return the samples of each data parallel rank over all mini-batches."""
    ranks = zip(*(plan.micro_batches for plan in plans), strict=True)
    return [[i for micros in rank for micro in micros for i in micro] for rank in ranks]


class MinibatchPlanner:
    """Plans the mini-batches of a batch once, so that every pass over the batch uses the same packing.

    For example, log-probs from before the first update are then bitwise equal to log-probs in that update.

    preferred_tokens: see `plan_micro_batches`.
    """

    def __init__(
        self, config: Config, dp: int, cost: Cost, *, shares_prompts: bool, preferred_tokens: int = 0
    ):
        self._prompts_per_minibatch = config.training.prompts_per_minibatch or config.data.prompts_per_step
        self._limits = {"max_tokens": config.training.row_tokens, "preferred_tokens": preferred_tokens}
        self._dp, self._cost = dp, cost
        self._multiple = config.training.micro_batch_multiple
        self._shares_prompts = shares_prompts
        self._batch: Callable[[], Batch | None] = lambda: None
        """Weak reference to the last planned batch; the batch's columns are freed with the step."""
        self._plans: list[MinibatchPlan] = []
        self._costs: dict[TrainingEngine, Cost] = {}

    @property
    def row_tokens(self) -> int:
        """Tokens that a micro-batch exceeds only for a long sample or, on a CPU, for a prompt's samples."""
        return min(self._limits["max_tokens"], self._limits["preferred_tokens"] or self._limits["max_tokens"])

    def plans(self, batch: Batch) -> list[MinibatchPlan]:
        """Return one plan per mini-batch, in the order of the optimizer steps."""
        if self._batch() is not batch:
            self._batch, self._plans = weakref.ref(batch), self.new_plans(batch)
        return self._plans

    def new_plans(self, batch: Batch) -> list[MinibatchPlan]:
        """Return the plans of a batch, without replacing the stored plans of the last planned batch."""
        num_groups = int(batch.groups.max()) + 1
        # Groups are divided evenly, so that no update is computed from a small remainder.
        num_minibatches = -(-num_groups // self._prompts_per_minibatch)
        minibatch_of = (batch.groups * num_minibatches).div(num_groups, rounding_mode="floor")
        members = [(minibatch_of == k).nonzero().squeeze(1).tolist() for k in range(num_minibatches)]
        work = Workload.of_batch(batch, cost=self._cost, shared_prefix=self._shares_prompts)
        return [self._plan_samples(work, samples, batch.samples_per_unit) for samples in members]

    def plan_in_place(self, batch: Batch, read: Batch, samples: Iterable[int]) -> MicroBatchPlan:
        """Return a plan of one pass over these samples. Each sample is on the rank that trains on it.

        read: the batch that the pass reads: `batch` itself, or the same samples with other prompts.
        """
        work = Workload.of_batch(read, cost=self._cost, shared_prefix=self._shares_prompts)
        own = set(samples)
        ranks = []
        for rank in range(self._dp):
            micros = [micro for plan in self.plans(batch) for micro in plan.micro_batches[rank]]
            indices = [i for micro in micros for i in micro if i in own]
            plan = plan_micro_batches(work, indices=indices, dp=1, **self._limits) if indices else [[]]
            ranks += plan
        count = next_multiple(max(map(len, ranks)), self._multiple)
        return [rank + [[]] * (count - len(rank)) for rank in ranks]

    def operations(self, batch: Batch, plans: list[MinibatchPlan], model: "TrainingEngine") -> int:
        """Return the number of operations of a model's forward pass over the plans, on all ranks."""
        return self._sum(batch, plans, self._cost_of(model))

    def update_operations(self, batch: Batch, plans: list[MinibatchPlan], model: "TrainingEngine") -> int:
        """Return the operations of a model's forward and backward pass over the plans, on all ranks.

        A backward pass computes gradients of the inputs and gradients of the weights; each of the two takes
        as many operations as a forward pass. A model with adapters needs no gradients of the weights. A
        frozen vision tower needs neither kind of gradient.
        """
        cost = self._cost_of(model)
        passes = 2 if any(part.freezes_model for part in model.parts) else 3
        whole = passes * self._sum(batch, plans, cost)
        if cost.tower is None or not model.has_frozen_weights:
            return whole
        return whole - (passes - 1) * self._sum(batch, plans, cost.of_images)

    def _cost_of(self, model: "TrainingEngine") -> Cost:
        if model not in self._costs:
            self._costs[model] = Cost.of_model(model.weight_map.hf, model.weight_map.weights)
        return self._costs[model]

    def _sum(self, batch: Batch, plans: list[MinibatchPlan], cost: Cost) -> int:
        work = Workload.of_batch(batch, cost=cost, shared_prefix=self._shares_prompts)
        return sum(work.cost(micro) for p in plans for rank in p.micro_batches for micro in rank)

    def _plan_samples(self, work: Workload, samples: list[int], samples_per_unit: int) -> MinibatchPlan:
        plan = plan_micro_batches(
            work,
            indices=samples,
            dp=self._dp,
            samples_per_unit=samples_per_unit,
            multiple=self._multiple,
            **self._limits,
        )
        return MinibatchPlan(plan, [[work.cost(micro) for micro in rank] for rank in plan])
