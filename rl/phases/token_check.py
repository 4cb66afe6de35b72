"""A check of an update: it counted every token of its mini-batch once, with its own mask and token id.

Each micro-batch adds codes of the tokens that its mask counts to the metrics of its loss, which the engine
sums over micro-batches and ranks anyway. The sum must be that of the mini-batch on the host. Micro-batches
that are lost or used twice, shifted masks, shifted targets and other tokens change it.
"""

import math

import numpy as np
import torch
from torch import Tensor

from rl.data.batch import Batch
from rl.phases.batch_checks import CheckFailed
from rl.training.loss import Loss, Totals
from rl.training.model import DTYPES
from rl.training.packing import MicroBatch

TOKENS, GAP, MOVED = "check/tokens", "check/gap", "check/moved"
"""Names of the sums among the metrics of an update."""
CODES = 1021
"""Codes of positions are 1 to CODES. The product with a token id is below 2**28, so that float64 sums 2**25
tokens exactly."""


class CountedLoss:
    """A loss of an update that also returns the sums of `check_update`.

    compare_old: whether the weights are still those of `old_logprobs`.
    """

    def __init__(self, loss: Loss, totals: Totals, *, compare_old: bool):
        self._loss, self._totals, self._compare_old = loss, totals, compare_old

    def __call__(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        value, terms = self._loss(micro, self._totals)
        device = micro.targets.device
        codes = _codes(micro.column_index).to(device, torch.float64)
        counted = micro.mask > 0
        terms = dict(terms)
        terms[TOKENS] = torch.where(counted, codes * (micro.targets + 1), 0.0).sum()
        if self._compare_old and micro.logprobs is not None and "old_logprobs" in micro.columns:
            gap = (micro.logprobs.detach() - micro.old_logprobs).abs()
            terms[GAP] = torch.where(counted, gap, 0.0).sum()
        return value, terms


def check_coverage(batch: Batch, samples: list[list[int]]) -> None:
    """Check that each sample of the batch is in one mini-batch."""
    planned = sorted(sample for minibatch in samples for sample in minibatch)
    if planned != list(range(len(batch))):
        counts = np.bincount(planned, minlength=len(batch))
        sample = int((counts != 1).argmax())
        raise CheckFailed(
            f"token check: sample {sample} of {len(batch)} is in {int(counts[sample])} mini-batches instead "
            f"of 1."
        )


def check_update(
    batch: Batch, samples: list[int], totals: Totals, terms: dict[str, float], *, lr: float, dtype: str
) -> None:
    """Remove the sums of `CountedLoss` from the terms of an update, and check them.

    Raises CheckFailed if tokens were lost, doubled or exchanged, if the first update of a step found other
    log-probs than `old_logprobs`, or if no weight changed.
    """
    index = batch.tokens_of(samples)
    counted = batch.mask[index] > 0
    ids = torch.from_numpy(np.concatenate([batch.response_ids[i] for i in samples]))
    expected = int((_codes(index) * (ids.long() + 1))[counted].sum())
    found = terms.pop(TOKENS)
    if found != expected or totals.num_tokens != max(int(counted.sum()), 1):
        raise CheckFailed(
            f"token check: the micro-batches of an update counted other tokens than its mini-batch has: code "
            f"{found:.0f} instead of {expected}, with {totals.num_tokens:.0f} tokens in the denominator and "
            f"{int(counted.sum())} in the mask. Samples are lost or used twice, or mask or tokens are "
            f"shifted."
        )
    gap = terms.pop(GAP, 0.0) / max(int(counted.sum()), 1)
    bound = math.sqrt(torch.finfo(DTYPES[dtype]).eps)
    if not gap <= bound:
        raise CheckFailed(
            f"first update check: |log pi - log pi_old| is {gap:.3g} on average before any update of the "
            f"step, "
            f"more than {bound:.2g} for model.dtype={dtype}: old_logprobs are of other weights or tokens."
        )
    if not terms.pop(MOVED) and terms["grad_norm"] > 0 and lr > 0:
        raise CheckFailed(
            f"movement check: the gradient norm is {terms['grad_norm']:.3g}, but the update changed no "
            f"weight."
        )


def _codes(index: Tensor) -> Tensor:
    """Return a code of each position, int64 [n], 1 to CODES."""
    return index * 40503 % CODES + 1
