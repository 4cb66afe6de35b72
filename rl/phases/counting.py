"""The count of the tokens that an update learned from, against those of its mini-batch."""

import torch
from torch import Tensor

from rl.data.batch import Batch
from rl.phases.minibatches import MinibatchPlan
from rl.runtime.collectives import gather_objects
from rl.training.grid import Grid
from rl.training.loss import Loss, Totals
from rl.training.packing import MicroBatch

COUNTED = "counted_tokens"
"""Name of the metric that `CountingLoss` adds: counted tokens / the loss's denominator, in all 1."""
TOLERANCE = 1e-9
"""Largest distance of that sum from 1; its terms are float64."""


class WrongTokens(RuntimeError):
    """Raised on every rank if an update did not count each token of its mini-batch once."""


class CountingLoss:
    """A loss that counts the tokens of its micro-batches, so that a lost or repeated one is found."""

    def __init__(self, loss: Loss, totals: Totals):
        self._loss, self._totals = loss, totals
        self._counts: list[Tensor] = []

    def __call__(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        value, terms = self._loss(micro, self._totals)
        count = micro.mask.sum(dtype=torch.float64)
        self._counts.append(count)
        return value, {**terms, COUNTED: count / self._totals.num_tokens}

    def check(self, share: float, batch: Batch, plan: MinibatchPlan, grid: Grid) -> None:
        """Raise WrongTokens unless `share`, the sum of COUNTED over all ranks, is 1.

        Collective over the world if it is not, to find the ranks.
        """
        if abs(share - 1.0) <= TOLERANCE:
            return
        planned = [
            float(batch.mask[batch.tokens_of(sorted(i for micro in rank for i in micro))].sum())
            for rank in plan.micro_batches
        ]
        if not sum(planned):
            return
        own = (grid.dp_rank, float(sum(self._counts)), self._totals.num_tokens)
        everyone = gather_objects(own if grid.reports_results else None)
        texts = [
            f"rank {rank} counted {found[1]:g} of {planned[found[0]]:g} tokens and divided by {found[2]:g}"
            for rank, found in enumerate(everyone)
            if found is not None
        ]
        raise WrongTokens(
            f"an update counted {share:.6g} times the {sum(planned):g} tokens of its mini-batch: "
            f"{'; '.join(texts)}. Each token counts once, and all ranks divide by their number."
        )
