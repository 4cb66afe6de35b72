"""The update phase: optimizer steps on the mini-batches of a batch."""

from collections.abc import Callable

import torch
from torch import Tensor

from rl.config.schema import Config, Optimizer
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.faults.agreement import check_replicas
from rl.objectives.aggregate import aggregate
from rl.objectives.value_loss import explained_variance, value_loss
from rl.phases.batch_metrics import balance_metrics, spread
from rl.phases.minibatches import MinibatchPlan, MinibatchPlanner
from rl.phases.step import Step
from rl.rollout.sampling import seed_of
from rl.runtime.session import control_group
from rl.training.engine import TrainingEngine
from rl.training.loss import Loss, Totals
from rl.training.packing import MicroBatch
from rl.training.schedule import learning_rate

TokenSelection = Callable[[Batch, Tensor, int], Tensor]
"""(mini-batch, log-probs [T] under the current weights, seed) -> 1 for selected tokens, else 0, [T]."""


class Updates:
    """Makes `training.epochs` passes over the mini-batches, with one optimizer step on each mini-batch.

    Methods are collective over the world.
    """

    def __init__(
        self, config: Config, step: Step, engines: Engines, memory: MemorySharing, planner: MinibatchPlanner
    ):
        self._config, self._step, self._engines = config, step, engines
        self._memory, self._planner = memory, planner

    def policy(self, batch: Batch, loss: Loss, *, select_tokens: TokenSelection | None = None) -> None:
        """Update the policy.

        select_tokens: called before each update with the whole mini-batch and its log-probs under the current
        weights. The loss reads the result as the column `selected_tokens`.
        """
        step, policy = self._step, self._engines.policy
        if batch.advantages is not None:
            step.metrics |= spread("critic/advantages", batch.advantages[batch.mask > 0])
        num_tokens = batch.prompt_lengths + batch.lengths
        plans = [plan.micro_batches for plan in self._planner.plans(batch)]
        ranks = [[i for p in plans for micro in p[rank] for i in micro] for rank in range(policy.grid.dp)]
        step.metrics |= balance_metrics(num_tokens.tolist(), ranks)
        first_version = policy.version

        def before_update(plan: MinibatchPlan) -> None:
            if select_tokens is not None:
                self._select_tokens(batch, plan, select_tokens, number=policy.version - first_version)

        means = self._learn(
            policy,
            batch,
            loss,
            self._config.training.optimizer,
            timing="update_actor",
            before_update=before_update,
            warmup_steps=self._config.critic.warmup_steps,
        )
        step.num_tokens += int(num_tokens.sum())
        step.metrics |= _prefixed("actor", means)

    def critic(self, batch: Batch) -> None:
        """Update the critic with the value loss; reads `returns` and `old_values`."""
        assert self._engines.critic is not None and batch.old_values is not None
        clip = self._config.critic.value_clip

        def loss(micro: MicroBatch, totals: Totals):
            token_loss, stats = value_loss(
                micro.values, micro.old_values, micro.returns, micro.mask, clip=clip
            )
            value = aggregate(
                token_loss,
                micro.mask,
                micro.lengths,
                "token-mean",
                num_tokens=totals.num_tokens,
                num_samples=totals.num_samples,
            )
            return value, {"vf_loss": value, "vf_clipfrac": stats["vf_clipfrac"] / totals.num_tokens}

        adam, metrics = self._config.critic.optimizer, self._step.metrics
        means = self._learn(self._engines.critic, batch, loss, adam, timing="update_critic")
        counted = batch.mask > 0
        metrics |= _prefixed("critic", means)
        metrics |= spread("critic/values", batch.old_values[counted])
        metrics |= spread("critic/returns", batch.returns[counted])
        metrics["critic/vf_explained_var"] = explained_variance(batch.old_values, batch.returns, batch.mask)

    def implicit_reward(self, batch: Batch, loss: Loss) -> None:
        """Update the implicit reward model; reads `labels` and `implicit_ref_logprobs`."""
        model, adam = self._engines.implicit_reward, self._config.implicit_reward.optimizer
        assert model is not None, "this run has no implicit reward model"
        means = self._learn(model, batch, loss, adam, timing="update_implicit_reward")
        self._step.metrics |= _prefixed("implicit_reward", means)

    def _learn(
        self,
        model: TrainingEngine,
        batch: Batch,
        loss: Loss,
        optimizer: Optimizer,
        *,
        timing: str,
        before_update: Callable[[MinibatchPlan], None] | None = None,
        warmup_steps: int = 0,
    ) -> dict[str, float]:
        """Update one model; return the loss's metrics, averaged over the updates, and the learning rate.

        warmup_steps: number of steps before the learning rate schedule of this model starts.
        """
        self._memory.to_training()
        step, epochs = self._step, self._config.training.epochs
        step.is_committed = True
        lr = learning_rate(optimizer, step.number - warmup_steps, self._config.run.max_steps - warmup_steps)
        self._check_replicas(model)
        plans, sums = self._planner.plans(batch), {}
        phase = step.phase("update", timing=timing, batch=batch.fingerprint)
        with phase, step.bar("train", len(batch) * epochs) as bar:
            for plan in plans * epochs:
                if before_update is not None:
                    before_update(plan)
                totals = plan.totals(batch)
                micro_loss = lambda micro, totals=totals: loss(micro, totals)  # noqa: E731
                reads = getattr(loss, "reads", None)
                terms = model.update(
                    batch, plan.micro_batches, micro_loss, lr=lr, outputs=reads, progress=bar
                )
                for name, value in terms.items():
                    sums[name] = sums.get(name, 0.0) + value
        num_updates = len(plans) * epochs
        return {name: value / num_updates for name, value in sums.items()} | {"lr": lr}

    def _check_replicas(self, model: TrainingEngine) -> None:
        """Compare the weights across data parallel ranks, if this step is due for it.

        Due are the first step and every `agreement.weights_every` steps. The comparison precedes the updates,
        because an update overwrites every weight on all ranks with the value of the rank that owns it.
        """
        every, step = self._config.agreement.weights_every, self._step
        if every and (step.number % every == 0 or step.is_first_of_start):
            name = next(name for name, other in self._engines.learning.items() if other is model)
            with step.timed("agreement"):
                check_replicas(name, model.replicas(), control_group())

    def _select_tokens(
        self, batch: Batch, plan: MinibatchPlan, select: TokenSelection, *, number: int
    ) -> None:
        """Fill `selected_tokens` for the samples of a mini-batch, before update `number` of this step."""
        samples = plan.samples
        logprobs = batch.old_logprobs
        if number > 0 or self._config.rollout_correction.bypass:  # old_logprobs are of other weights
            (logprobs,) = self._engines.policy.forward(batch, [plan.micro_batches], ("logprobs",))
        offsets = batch.offsets
        index = torch.cat([torch.arange(int(offsets[i]), int(offsets[i + 1])) for i in samples])
        batch.selected_tokens = torch.zeros(len(batch.mask))
        seed = seed_of(self._config.run.seed, "choose", self._step.number, number)
        batch.selected_tokens[index] = select(batch.select(samples), logprobs[index], seed).float()


def _prefixed(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics with the prefix before names that have none."""
    return {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}
