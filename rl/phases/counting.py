"""The tokens that an update learned from, against those of its mini-batch, and what the update did."""

import math

import numpy as np
import torch
from torch import Tensor

from rl.data.batch import Batch
from rl.phases.batch_checks import CheckFailed
from rl.phases.minibatches import MinibatchPlan
from rl.runtime.collectives import gather_objects
from rl.training.grid import Grid
from rl.training.loss import Loss, Totals
from rl.training.model import DTYPES
from rl.training.packing import MicroBatch

COUNTED = "counted_tokens"
"""Name of the metric that `CountingLoss` adds: counted tokens / the loss's denominator, in all 1."""
CODES = "counted_codes"
"""Name of the sum of codes of the counted tokens, by position and token id."""
GAP = "first_update_gap"
"""Name of the sum of |log pi - log pi_old| / the loss's denominator, before any update of the step."""
MOVED = "check/moved"
"""Name of the share of data parallel ranks whose weights changed, from `TrainingEngine.update`."""
TOLERANCE = 1e-9
"""Largest distance of the sum of COUNTED from 1; its terms are float64."""
NUM_CODES = 1021
"""Codes of positions are 1 to NUM_CODES. The product with a token id is below 2**28, so that float64 sums
2**25 tokens exactly."""


class WrongTokens(RuntimeError):
    """Raised on every rank if an update did not count each token of its mini-batch once."""


class CountingLoss:
    """A loss that counts the tokens of its micro-batches, so that a lost, repeated or wrong one is found.

    compare_old: whether the weights are still those of `old_logprobs`.
    """

    def __init__(self, loss: Loss, totals: Totals, *, compare_old: bool = False):
        self._loss, self._totals, self._compare_old = loss, totals, compare_old
        self._counts: list[Tensor] = []
        self._codes: list[Tensor] = []

    def __call__(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        value, terms = self._loss(micro, self._totals)
        counted = micro.mask > 0
        count = micro.mask.sum(dtype=torch.float64)
        positions = _codes(micro.column_index).to(micro.targets.device, torch.float64)
        codes = torch.where(counted, positions * (micro.targets + 1), 0.0).sum()
        self._counts.append(count)
        self._codes.append(codes)
        terms = {**terms, COUNTED: count / self._totals.num_tokens, CODES: codes}
        if self._compare_old and micro.logprobs is not None and "old_logprobs" in micro.columns:
            gap = (micro.logprobs.detach() - micro.old_logprobs).abs()
            terms[GAP] = torch.where(counted, gap, 0.0).sum() / self._totals.num_tokens
        return value, terms

    def check(self, terms: dict[str, float], batch: Batch, plan: MinibatchPlan, grid: Grid) -> None:
        """Remove COUNTED and CODES from the terms, sums over all ranks, and check them.

        Raises WrongTokens unless every token of the mini-batch was counted once, with its own mask and token
        id. Collective over the world if it was not, to find the ranks.
        """
        share, found = terms.pop(COUNTED), terms.pop(CODES)
        planned = [_planned(batch, [i for micro in rank for i in micro]) for rank in plan.micro_batches]
        total, code = sum(count for count, _ in planned), sum(code for _, code in planned)
        if not total or (abs(share - 1.0) <= TOLERANCE and found == code):
            return
        own = (grid.dp_rank, float(sum(self._counts)), float(sum(self._codes)), self._totals.num_tokens)
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


def check_update(terms: dict[str, float], *, lr: float, dtype: str) -> None:
    """Remove GAP and MOVED from the terms of an update, sums over all ranks, and check them.

    Raises CheckFailed if the first update of a step found other log-probs than `old_logprobs`, or if no
    weight changed although there was a gradient.
    """
    gap, bound = terms.pop(GAP, 0.0), math.sqrt(torch.finfo(DTYPES[dtype]).eps)
    if not gap <= bound:
        raise CheckFailed(
            f"first update check: |log pi - log pi_old| is {gap:.3g} on average before any update of the "
            f"step, more than {bound:.2g} for model.dtype={dtype}: old_logprobs are of other weights or "
            "tokens."
        )
    if not terms.pop(MOVED) and terms["grad_norm"] > 0 and lr > 0:
        raise CheckFailed(
            f"movement check: the gradient norm is {terms['grad_norm']:.3g}, but the update changed no "
            "weight."
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
