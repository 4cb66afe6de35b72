"""Log-probs of the old policy: from a pass over the batch or, with one update per step, from the update.

If a step has only one update, the ratio of new to old policy in this update is exactly 1. The update's own
log-probs, detached, are therefore the old log-probs. With several updates, for example with
training.epochs=2, a separate pass computes the old log-probs before the first update.
"""

from dataclasses import replace

import torch
from torch import Tensor

from rl.checks.checks import Checks
from rl.config.correction import RolloutCorrection
from rl.config.needs import needs_early_logprobs
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.phases.batch_metrics import engine_gap, token_mean
from rl.phases.correction import loss_weights, weigh
from rl.phases.minibatches import MinibatchPlanner
from rl.phases.step_record import StepRecord
from rl.runtime.collectives import sum_over_world
from rl.training.engine import TrainingEngine
from rl.training.loss import Loss, Totals
from rl.training.packing import MicroBatch

OUTPUTS = ("logprobs", "entropy")
"""Outputs of the old policy that a step stores."""


class OldLogprobs:
    """Fills the old log-probs of batches."""

    def __init__(
        self,
        config: Config,
        step: StepRecord,
        policy: TrainingEngine,
        planner: MinibatchPlanner,
        checks: Checks,
    ):
        self._config, self._step, self._policy = config, step, policy
        self._planner, self._checks = planner, checks
        self.computed_at: int | None = None
        """Number of the policy's updates when the last old log-probs were computed."""

    def may_defer(self, batch: Batch) -> bool:
        """Return whether the update may fill the old log-probs.

        It may if the step has only one update, and nothing reads the old log-probs earlier.
        """
        num_updates = self._config.training.epochs * len(self._planner.plans(batch))
        updates_policy = self._step.number > self._config.critic.warmup_steps
        return num_updates == 1 and updates_policy and not needs_early_logprobs(self._config)

    def only_update(self, batch: Batch, loss: Loss) -> "OnlyUpdate | None":
        """Return the update that fills the old log-probs of a batch, or None.

        Returns None if the old log-probs are already filled or not needed. Raises RuntimeError if the policy
        or the batch changed after the old log-probs were deferred to the update.
        """
        if batch.deferred_at is None:
            return None
        if batch.deferred_at != self._policy.num_updates or not self.may_defer(batch):
            raise RuntimeError(
                f"algorithm={self._config.algorithm} updated the policy, or added samples, between log_probs "
                'and update of a batch; add "old_logprobs" to its NEEDS, so that log_probs computes them.'
            )
        return OnlyUpdate(loss, self._config.rollout_correction)

    def fill(self, batch: Batch, logprobs: Tensor, entropy: Tensor, weights: Tensor | None) -> None:
        """Fill `old_logprobs` and `loss_weights`, check them, and log how engine and trainer differ.

        logprobs, entropy: computed under the policy before this step's updates, float32 [T]. weights: weights
        of the rollout correction, float32 [T]; None if the correction has no weights.
        """
        metrics = self._step.metrics
        self.computed_at = self._policy.num_updates if batch.deferred_at is None else batch.deferred_at
        batch.old_logprobs, batch.deferred_at = logprobs, None
        plans = [plan.micro_batches for plan in self._planner.plans(batch)]
        metrics["actor/entropy"] = token_mean(entropy, batch.mask)
        metrics |= engine_gap(batch, logprobs)
        metrics |= self._checks.log_probs(batch, plans, reference=False, entropy=entropy)
        metrics |= weigh(batch, self._config.rollout_correction, weights)


class OnlyUpdate:
    """Stores the outputs of the only update of a step as outputs of the old policy.

    The last pipeline stage calls `loss`. Afterwards `outputs` returns the stored outputs.
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
        logprobs, entropy = (micro.outputs[name].detach() for name in OUTPUTS)
        filled, weights = {"old_logprobs": logprobs}, None
        if "rollout_logprobs" in micro.columns:
            pair = logprobs, micro.column("rollout_logprobs")
            weights = loss_weights(self._correction, *pair, micro.lengths, micro.mask)
        if weights is not None:
            filled["loss_weights"] = weights
        stored = (logprobs, entropy, torch.zeros_like(logprobs) if weights is None else weights)
        self._stored.append((micro.column_index, torch.stack(stored)))
        return self._loss(replace(micro, columns=micro.columns | filled), totals)

    def outputs(self, policy: TrainingEngine, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probs, entropies and weights of the batch's tokens, for `OldLogprobs.fill`.

        Collective over the world.
        """
        stored = torch.zeros(3, len(batch.mask))
        if policy.grid.reports_results:
            for index, values in self._stored:
                stored[:, index] = values.cpu()
        logprobs, entropy, weights = sum_over_world(stored, policy.device.torch)
        has_weights = self._correction.has_weights and batch.rollout_logprobs is not None
        return logprobs, entropy, weights if has_weights else None
