"""Checks of an update: its learning rate, the tokens that it learned from, and what it did."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.checks.batches import CheckFailed
from rl.data.batch import Batch
from rl.runtime.collectives import gather_objects, sum_over_world
from rl.training.engine import MicroBatchLoss, UpdateResult
from rl.training.grid import Grid
from rl.training.learning_rate import RateSchedule
from rl.training.loss import Totals
from rl.training.micro_batch_plans import MicroBatchPlan
from rl.training.model import DTYPES
from rl.training.packing import MicroBatch

TOLERANCE = 1e-9
"""Largest distance of the counted share from 1; its terms are float64."""
SMALL_LR = 0.01
"""Share of the peak learning rate from which an update must change weights. Far below it, at the ends of a
schedule, float32 may round every change away."""
SMALL_NORM = 1e-6
"""Gradient norm from which an update must change weights. Below it Adam's epsilon may dominate."""
GRADIENT_TOLERANCE = 1e-5
"""Largest difference of the gradient that arrives at the outputs from the loss's, relative to its size."""
OUTPUTS = ("logprobs", "entropy", "sum_p_squared", "divergence", "values")
"""Outputs of a model that a loss may read (`rl.training.packing.MicroBatch`)."""
NUM_CODES = 1021
"""Codes of positions are 1 to NUM_CODES. The product with a token id is below 2**28, so that float64 sums
2**25 tokens exactly."""


class WrongTokens(RuntimeError):
    """Raised on every rank if an update did not count each token of its mini-batch once."""


class Counts:
    """Counts the tokens of an update's micro-batches, so that a lost, repeated or wrong one is found.

    totals: denominators of the loss. compare_old: whether the weights are still those of `old_logprobs`.
    """

    def __init__(self, totals: Totals, *, compare_old: bool = False):
        self._totals, self._compare_old = totals, compare_old
        self._own: list[Tensor] = []
        self._arrived: list[Tensor] = []
        self._is_watching = False

    def watched(self, loss: MicroBatchLoss) -> MicroBatchLoss:
        """Return the loss, whose gradient is compared with what arrives at the model's outputs.

        What the schedule or the engine multiplies the loss with would be a factor of every gradient. One
        micro-batch of the update is watched; its gradient is that of the loss alone.
        """

        def call(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            value, metrics = loss(micro)
            named = (getattr(micro, name) for name in OUTPUTS)
            outputs = [x for x in named if x is not None and x.requires_grad]
            if not self._is_watching and outputs and len(outputs[0]) and value.requires_grad:
                self._is_watching = True
                slopes = torch.autograd.grad(value, outputs, retain_graph=True, allow_unused=True)
                for output, slope in zip(outputs, slopes):
                    if slope is not None:
                        output.register_hook(partial(self._arrive, slope))
            return value, metrics

        return call

    def _arrive(self, slope: Tensor, gradient: Tensor) -> None:
        terms = ((gradient - slope).abs().sum(), slope.abs().sum())
        self._arrived.append(torch.stack(terms).double())

    def __call__(self, micro: MicroBatch) -> Tensor:
        """Return what a micro-batch adds to `UpdateResult.observed`, float64 [3].

        These are counted tokens / the loss's denominator, 1 over all; the sum of codes of the counted tokens,
        by position and token id; and the sum of |log pi - log pi_old| / the loss's denominator.
        """
        counted = micro.mask > 0
        count = micro.mask.sum(dtype=torch.float64)
        positions = _codes(micro.column_index).to(micro.targets.device, torch.float64)
        codes = torch.where(counted, positions * (micro.targets + 1), 0.0).sum()
        self._own.append(torch.stack((count, codes)))
        gap = torch.zeros_like(count)
        if self._compare_old and micro.logprobs is not None and "old_logprobs" in micro.columns:
            gaps = (micro.logprobs.detach() - micro.old_logprobs).abs()
            gap = torch.where(counted, gaps, 0.0).sum() / self._totals.num_tokens
        return torch.stack((count / self._totals.num_tokens, codes, gap.double()))

    def check(
        self, result: UpdateResult, batch: Batch, plan: MicroBatchPlan, grid: Grid, device: torch.device
    ) -> None:
        """Raise WrongTokens unless every token of the mini-batch was counted once, with its own mask and id.

        Raises WrongGradient if another gradient than the loss's arrived at the model's outputs. Collective
        over the world.
        """
        self._check_gradient(grid, device)
        share, found, _ = result.observed
        planned = [_planned(batch, [i for micro in rank for i in micro]) for rank in plan]
        total, code = sum(count for count, _ in planned), sum(code for _, code in planned)
        if not total or (abs(share - 1.0) <= TOLERANCE and found == code):
            return
        counts = torch.stack(self._own).sum(0).tolist() if self._own else [0.0, 0.0]
        own = (grid.dp_rank, *counts, self._totals.num_tokens)
        texts = []
        for rank, theirs in enumerate(gather_objects(own if grid.reports_results else None)):
            if theirs is None:
                continue
            place, counted, codes, denominator = theirs
            wrong = codes != planned[place][1]
            texts.append(
                f"rank {rank} counted {counted:g} of {planned[place][0]:g} tokens"
                f"{', not those of its samples,' if wrong else ''} and divided by {denominator:g}"
            )
        raise WrongTokens(
            f"an update counted {share:.6g} times the {total:g} tokens of its mini-batch: "
            f"{'; '.join(texts)}. Each token counts once, with its own mask and token id, and all ranks "
            "divide by their number."
        )

    def _check_gradient(self, grid: Grid, device: torch.device) -> None:
        own = torch.zeros(2, dtype=torch.float64)
        if self._arrived and grid.reports_results:
            own = torch.stack(self._arrived).sum(0).cpu()
        difference, size = sum_over_world(own, device).tolist()
        if difference > GRADIENT_TOLERANCE * size:
            raise WrongGradient(
                f"the gradient that arrived at the model's outputs differs from that of the loss by "
                f"{difference / size:.3g} of its size: the loss was multiplied or replaced on its way into "
                "the schedule of the backward pass."
            )


class WrongGradient(RuntimeError):
    """Raised on every rank if the backward pass began with another gradient than that of the loss."""


class WrongLearningRate(RuntimeError):
    """Raised on every rank if a resumed run's schedule does not continue that of the checkpoint."""


class LearningRates:
    """Learning rate of each model's last update, with its step and schedule; kept in checkpoints."""

    def __init__(self):
        self.last: dict[str, dict[str, Any]] = {}

    def check(self, name: str, schedule: RateSchedule, step: int) -> None:
        """Note the rate of a step, and compare that of the step before a resume with the present schedule.

        Raises CheckFailed if the rate is 0, and WrongLearningRate if the same schedule gives another rate for
        the step before than the one used.
        """
        optimizer, rate = schedule.optimizer, schedule.rate(step)
        if rate <= 0 < optimizer.lr:
            raise CheckFailed(
                f"learning rate check: {rate} in step {step} of {schedule.last_step}, with "
                f"optimizer.lr={optimizer.lr} and schedule={optimizer.schedule}."
            )
        end = None if optimizer.schedule == "constant" else schedule.last_step
        key = repr((optimizer, schedule.warmup_steps, end))
        before = self.last.get(name)
        self.last[name] = {"step": step, "rate": rate, "schedule": key}
        if before is None or before["step"] != step - 1 or before["schedule"] != key:
            return
        now = schedule.rate(step - 1)
        if now != before["rate"]:
            raise WrongLearningRate(
                f"the learning rate of the {name} was {before['rate']:g} in step {step - 1}, but the same "
                f"schedule now gives {now:g} for that step: it does not continue where the checkpoint ended."
            )


def check_coverage(batch: Batch, samples: list[list[int]]) -> None:
    """Raise CheckFailed unless each sample of the batch is in one mini-batch."""
    planned = sorted(sample for minibatch in samples for sample in minibatch)
    if planned != list(range(len(batch))):
        counts = np.bincount(planned, minlength=len(batch))
        sample = int((counts != 1).argmax())
        raise CheckFailed(
            f"mini-batch check: sample {sample} of {len(batch)} is in {int(counts[sample])} mini-batches "
            "instead of 1."
        )


def check_update(result: UpdateResult, *, lr: float, peak_lr: float, dtype: str) -> None:
    """Check what an update did.

    Raises CheckFailed if the first update of a step found other log-probs than `old_logprobs`, or if no
    weight changed although there was a gradient.
    """
    gap, bound = result.observed[2], math.sqrt(torch.finfo(DTYPES[dtype]).eps)
    if not gap <= bound:
        raise CheckFailed(
            f"first update check: |log pi - log pi_old| is {gap:.3g} on average before any update of the "
            f"step, more than {bound:.2g} for model.dtype={dtype}: old_logprobs are of other weights or "
            "tokens."
        )
    if not result.has_moved and result.grad_norm > SMALL_NORM and lr > SMALL_LR * peak_lr:
        raise CheckFailed(
            f"movement check: the gradient norm is {result.grad_norm:.3g} and the learning rate {lr:.3g}, "
            "but the update changed no weight."
        )


def _planned(batch: Batch, samples: list[int]) -> tuple[float, int]:
    """Return number and sum of codes of the counted tokens of the samples."""
    if not samples:
        return 0.0, 0
    index = batch.tokens_of(samples)
    counted = batch.mask[index] > 0
    ids = torch.from_numpy(np.concatenate([batch.response_ids[i] for i in samples]))
    return float(batch.mask[index].sum()), int((_codes(index) * (ids.long() + 1))[counted].sum())


def _codes(index: Tensor) -> Tensor:
    """Return a code of each position, int64 [n], 1 to NUM_CODES."""
    return index * 40503 % NUM_CODES + 1
