"""Log-probs of the old policy from the forward pass of the first update, instead of a separate pass."""

import torch
from torch import Tensor

from rl.config.correction import RolloutCorrection
from rl.data.batch import Batch
from rl.phases.correction import loss_weights
from rl.phases.minibatches import MinibatchPlan
from rl.runtime.collectives import sum_over_world
from rl.training.engine import TrainingEngine
from rl.training.loss import Loss, Totals
from rl.training.packing import MicroBatch

OUTPUTS = ("logprobs", "entropy")
"""Outputs of the old policy that a step stores."""


class FirstUpdate:
    """The loss of a policy update whose old log-probs are those of its own forward pass.

    The ratio of new to old policy is exactly 1 in this update, as with a separate pass under the same
    weights. The last pipeline stage calls `loss`. Afterwards `outputs` returns what the calls stored.
    """

    def __init__(self, loss: Loss, correction: RolloutCorrection):
        self._loss, self._correction = loss, correction
        self._kept: list[tuple[Tensor, Tensor]] = []

    @property
    def loss(self) -> Loss:
        """The loss, which also stores the outputs and fills the columns."""
        reads = self._loss.reads
        reads = None if reads is None else tuple(dict.fromkeys((*OUTPUTS, *reads)))
        return Loss(self._stored, reads=reads)

    def _stored(self, micro: MicroBatch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the micro-batch, with the columns `old_logprobs` and `loss_weights` filled."""
        kept = torch.stack([getattr(micro, name).detach() for name in OUTPUTS])
        self._kept.append((micro.column_index, kept))
        micro.columns["old_logprobs"] = kept[0]
        if "rollout_logprobs" in micro.columns:
            pair = kept[0], micro.rollout_logprobs
            weights = loss_weights(self._correction, *pair, micro.lengths, micro.mask)
            if weights is not None:
                micro.columns["loss_weights"] = weights
        return self._loss(micro, totals)

    def outputs(self, policy: TrainingEngine, batch: Batch, plan: MinibatchPlan, rest: Tensor) -> Tensor:
        """Return OUTPUTS at every response token, float32 [2, T], on every rank. Collective over the world.

        plan: the mini-batch of the update. rest: OUTPUTS of the other mini-batches.
        """
        here = torch.zeros_like(rest)
        if policy.grid.reports_results:
            for index, values in self._kept:
                here[:, index] = values.cpu()
        own = batch.tokens_of(plan.samples)
        outputs = rest.clone()
        outputs[:, own] = sum_over_world(here[:, own], policy.device.torch)
        return outputs
