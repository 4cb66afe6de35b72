"""Log-probs of the old policy from the forward pass of the first update, instead of a separate pass."""

from dataclasses import replace

import torch
from torch import Tensor

from rl.config.correction import RolloutCorrection
from rl.phases.correction import loss_weights
from rl.runtime.collectives import sum_over_world
from rl.training.engine import TrainingEngine
from rl.training.loss import Loss, Totals
from rl.training.packing import MicroBatch

OUTPUTS = ("logprobs", "entropy")
"""Outputs of the old policy that a step stores."""


class FirstUpdate:
    """Stores the outputs of a policy update as those of the old policy.

    The ratio of new to old policy is exactly 1 in this update, as with a separate pass under the same
    weights. The last pipeline stage calls `loss`. Afterwards `outputs` returns what the calls stored.
    """

    def __init__(self, loss: Loss, correction: RolloutCorrection):
        self._loss, self._correction = loss, correction
        self._stored: list[tuple[Tensor, Tensor]] = []

    @property
    def loss(self) -> Loss:
        """The loss, which also stores the outputs and fills the columns `old_logprobs` and `loss_weights`."""
        reads = self._loss.reads
        return Loss(self._store, reads=None if reads is None else tuple(dict.fromkeys((*OUTPUTS, *reads))))

    def _store(self, micro: MicroBatch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = torch.stack([micro.outputs[name].detach() for name in OUTPUTS])
        self._stored.append((micro.column_index, outputs))
        filled = {"old_logprobs": outputs[0]}
        if "rollout_logprobs" in micro.columns:
            pair = outputs[0], micro.column("rollout_logprobs")
            weights = loss_weights(self._correction, *pair, micro.lengths, micro.mask)
            if weights is not None:
                filled["loss_weights"] = weights
        return self._loss(replace(micro, columns=micro.columns | filled), totals)

    def outputs(self, policy: TrainingEngine, num_tokens: int) -> Tensor:
        """Return OUTPUTS at the batch's tokens, float32 [2, T], 0 at those that the update did not read.

        Collective over the world.
        """
        stored = torch.zeros(len(OUTPUTS), num_tokens)
        if policy.grid.reports_results:
            for index, values in self._stored:
                stored[:, index] = values.cpu()
        return sum_over_world(stored, policy.device.torch)
