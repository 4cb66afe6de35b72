"""The update phase: optimizer steps on the mini-batches of a batch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl.config.declarations import shipped
from rl.config.schema import Config, Optimizer, algorithm_of
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.faults.agreement import check_master_weights, check_replicas
from rl.objectives.aggregate import aggregate
from rl.objectives.entropy_controller import AdaptiveEntropy
from rl.objectives.preference import mismatch_kl
from rl.objectives.segments import expand, segment_sum
from rl.objectives.value_loss import explained_variance, value_loss
from rl.phases.batch_checks import CheckFailed, check_advantages, check_informative
from rl.phases.batch_metrics import balance_metrics, imbalance_metrics, spread, token_mean
from rl.phases.counting import CountingLoss, check_coverage, check_update
from rl.phases.deferred import FirstUpdate
from rl.phases.inference import Inference
from rl.phases.minibatches import MinibatchPlan, MinibatchPlanner
from rl.phases.step import Step
from rl.rollout.sampling import seed_of
from rl.runtime.session import control_group
from rl.training.engine import TrainingEngine
from rl.training.loss import Loss, Totals
from rl.training.packing import MicroBatch
from rl.training.schedule import learning_rate

TokenSelection = Callable[[Batch, Tensor, int], Tensor]
"""(mini-batch, log-probs [T] under the current weights, seed) -> 1 for selected tokens, else 0, [T].

The attribute `reads` may name another output of the model that the function receives instead."""


def adaptive_entropy(config: Config) -> AdaptiveEntropy | None:
    """Return the controller of `objective.adaptive_entropy`, or None if the weight is fixed."""
    control = config.objective.adaptive_entropy
    if not control.target:
        return None
    bounds = dict(low=control.low, high=control.high)
    return AdaptiveEntropy(
        config.objective.entropy_coef, target=control.target, delta=control.delta, **bounds
    )


class WrongLearningRate(RuntimeError):
    """Raised on every rank if a resumed run's schedule does not continue that of the checkpoint."""


class Updates:
    """Makes `training.epochs` passes over the mini-batches, with one optimizer step on each mini-batch.

    Methods are collective over the world.
    """

    def __init__(
        self,
        config: Config,
        step: Step,
        engines: Engines,
        memory: MemorySharing,
        planner: MinibatchPlanner,
        inference: Inference,
    ):
        self._config, self._step, self._engines = config, step, engines
        self._memory, self._planner, self._inference = memory, planner, inference
        self.entropy_control = adaptive_entropy(config)
        """Weight of the entropy bonus, or None if it is `objective.entropy_coef`."""
        self._checked_losses: set[str] = set()
        """Losses whose gradient was checked in this process (`rl.phases.objective_check`)."""
        self.rates: dict[str, dict[str, Any]] = {}
        """Learning rate of each model's last update, with its step and schedule; kept in checkpoints."""

    def plans(self, batch: Batch) -> list[MinibatchPlan]:
        """Return one plan per mini-batch, in the order of the optimizer steps."""
        return self._planner.plans(batch)

    def policy(
        self,
        batch: Batch,
        loss: Loss,
        *,
        select_tokens: TokenSelection | None = None,
        mismatched: Batch | None = None,
    ) -> None:
        """Update the policy.

        If `Inference.log_probs` deferred the old log-probs, the first mini-batch takes them from its update's
        own forward pass. The other mini-batches take them from a separate pass before that update.

        select_tokens: called before each update with the whole mini-batch and its log-probs under the current
        weights. The loss reads the result as the column `selected_tokens`.
        mismatched: the prompts with responses to others (`Phases.mismatched`), with `ref_logprobs`. The loss
        gets `mismatch_kl` of those of the mini-batch under the current weights as `kl`.

        An adaptive weight of the entropy bonus (`objective.adaptive_entropy`) is passed to the loss as
        `entropy_coef`.
        """
        step, policy = self._step, self._engines.policy
        self._check(batch, loss)
        if batch.teacher_logprobs is not None:
            self._add_teacher(batch)
        if self.entropy_control is not None:
            weight = self.entropy_control.update(step.metrics["actor/entropy"])
            step.metrics["actor/entropy_coef"] = weight
            reads = loss.reads
            loss = partial(loss, entropy_coef=weight)
            loss.reads = reads
        if batch.advantages is not None:
            step.metrics |= spread("critic/advantages", batch.advantages[batch.mask > 0])
        if batch.trajectories is not None:
            counts = segment_sum(batch.mask.double(), batch.trajectory_lengths)
            batch.trajectory_tokens = expand(batch.of_trajectories(counts).float(), batch.lengths)
        num_tokens = batch.prompt_lengths + batch.lengths
        other_plans = [] if mismatched is None else self._planner.new_plans(mismatched)
        plans = self._planner.plans(batch)
        micro_batches = [plan.micro_batches for plan in plans]
        ranks = [[i for p in micro_batches for micro in p[r] for i in micro] for r in range(policy.grid.dp)]
        step.metrics |= balance_metrics(num_tokens.tolist(), ranks)
        step.metrics |= imbalance_metrics([plan.costs for plan in plans if plan.costs is not None])
        first_update = policy.num_updates
        others = self._outputs_after_the_first(batch)

        @contextmanager
        def update_of(plan: MinibatchPlan) -> Iterator[Loss]:
            if select_tokens is not None:
                self._select_tokens(batch, plan, select_tokens, number=policy.num_updates - first_update)
            if mismatched is not None:
                yield partial(loss, kl=self._mismatch_kl(mismatched, other_plans[plans.index(plan)]))
                return
            if others is None or policy.num_updates > first_update:
                yield loss
                return
            first = FirstUpdate(loss, self._config.rollout_correction)
            yield first
            outputs = first.outputs(policy, batch, plan, others)
            self._inference.fill_old_logprobs(batch, *outputs, first=plan)

        means = self._learn(
            policy,
            batch,
            loss,
            self._config.training.optimizer,
            timing="update_actor",
            update_of=update_of,
            warmup_steps=self._config.critic.warmup_steps,
        )
        policy.version += 1
        step.num_tokens += int(num_tokens.sum())
        step.metrics |= _prefixed("actor", means)
        if "actor/kl_loss" in step.metrics:
            step.metrics["actor/kl_coef"] = self._config.objective.kl_coef

    def critic(self, batch: Batch) -> None:
        """Update the critic with the value loss; reads `returns` and `old_values`."""
        assert batch.old_values is not None
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
            return value, {"vf_loss": value} | {
                name: stats[name] / totals.num_tokens for name in ("vf_clipfrac", "vpred_mean")
            }

        adam, metrics = self._config.critic.optimizer, self._step.metrics
        means = self._learn(self._engines.training["critic"], batch, loss, adam, timing="update_critic")
        counted = batch.mask > 0
        metrics |= _prefixed("critic", means)
        metrics |= spread("critic/values", batch.old_values[counted])
        metrics |= spread("critic/returns", batch.returns[counted])
        metrics["critic/vf_explained_var"] = explained_variance(batch.old_values, batch.returns, batch.mask)

    def implicit_reward(self, batch: Batch, loss: Loss) -> None:
        """Update the implicit reward model; reads `labels` and `implicit_ref_logprobs`."""
        model, adam = self._engines.training["implicit_reward"], self._config.implicit_reward.optimizer
        means = self._learn(model, batch, loss, adam, timing="update_implicit_reward")
        self._step.metrics |= _prefixed("implicit_reward", means)

    def _add_teacher(self, batch: Batch) -> None:
        """Add the teacher's part to the advantages, and log the sizes of both parts."""
        from rl.objectives.distillation import log_ratio_advantages

        assert batch.advantages is not None and batch.old_logprobs is not None
        coef = self._config.teacher.advantage_coef
        added = log_ratio_advantages(batch.teacher_logprobs, batch.old_logprobs, coef=coef)
        added = torch.where(batch.mask > 0, added, 0.0)
        parts = {"reward": batch.advantages, "teacher": added}
        for name, part in parts.items():
            self._step.metrics[f"teacher/advantage_of_{name}/mean"] = token_mean(part, batch.mask)
            self._step.metrics[f"teacher/advantage_of_{name}/abs"] = token_mean(part.abs(), batch.mask)
        batch.advantages = batch.advantages + added
        batch.teacher_logprobs = None  # a second update must not add them again

    def _check(self, batch: Batch, loss: Loss) -> None:
        """Check the advantages of a shipped algorithm, and once the loss. Raises CheckFailed on every rank.

        A user's algorithm may select samples and shape advantages as it likes.
        """
        config = self._config
        estimator, _ = config.objective.chosen
        if estimator is not None and config.algorithm in shipped():
            check_advantages(batch, estimator)
            if "dynamic_sampling" in algorithm_of(config).needs:
                check_informative(batch)
        check = getattr(loss, "check", None)  # the attribute of a loss of `policy_gradient.policy_loss`
        if check is not None and config.objective.loss not in self._checked_losses:
            self._checked_losses.add(config.objective.loss)
            check()

    def _learn(
        self,
        model: TrainingEngine,
        batch: Batch,
        loss: Loss,
        optimizer: Optimizer,
        *,
        timing: str,
        update_of: Callable[[MinibatchPlan], AbstractContextManager[Loss]] | None = None,
        warmup_steps: int = 0,
    ) -> dict[str, float]:
        """Update one model; return the loss's metrics, averaged over the updates, and the learning rate.

        update_of: context manager around the update on a mini-batch, yields its loss; None: `loss`.
        warmup_steps: number of steps before the learning rate schedule of this model starts.
        """
        self._memory.to_training()
        if model is self._engines.policy:
            self._memory.wait_for_readers()
        step, epochs = self._step, self._config.training.epochs
        step.is_committed = True
        lr = learning_rate(optimizer, step.number - warmup_steps, self._config.run.max_steps - warmup_steps)
        if lr <= 0 < optimizer.lr:
            raise CheckFailed(
                f"learning rate check: {lr} in step {step.number} of {self._config.run.max_steps}, with "
                f"optimizer.lr={optimizer.lr} and schedule={optimizer.schedule}."
            )
        self._check_replicas(model)
        self._check_schedule(model, optimizer, lr, warmup_steps)
        plans, sums = self._planner.plans(batch), {}
        check_coverage(batch, [plan.samples for plan in plans])
        is_first = model is self._engines.policy and self._inference.has_old_logprobs(batch)
        phase = step.phase("update", timing=timing, batch=batch.fingerprint)
        with phase, step.bar("train", len(batch) * epochs) as bar:
            for plan in plans * epochs:
                with nullcontext(loss) if update_of is None else update_of(plan) as chosen:
                    counting = CountingLoss(chosen, plan.totals(batch), compare_old=is_first)
                    reads = getattr(chosen, "reads", None)
                    terms = model.update(
                        batch, plan.micro_batches, counting, lr=lr, outputs=reads, progress=bar
                    )
                    counting.check(terms, batch, plan, model.grid)
                    check_update(terms, lr=lr, peak_lr=optimizer.lr, dtype=self._config.model.dtype)
                    is_first = False
                for name, value in terms.items():
                    sums[name] = sums.get(name, 0.0) + value
        if step.peak_tflops:
            # A backward pass takes as many operations as a forward pass for the input's gradients, and as
            # many for the weights' gradients.
            passes = 2 if model.has_frozen_weights else 3
            step.operations[timing] += passes * epochs * self._planner.operations(batch, plans, model)
        num_updates = len(plans) * epochs
        return {name: value / num_updates for name, value in sums.items()} | {"lr": lr}

    def _outputs_after_the_first(self, batch: Batch) -> Tensor | None:
        """Return the outputs of the old policy, float32 [2, T]; those of the first mini-batch are 0.

        Returns None if the old log-probs were not deferred. Raises RuntimeError if the policy was updated
        after `log_probs`.
        """
        if batch.deferred_at is None:
            return None
        if batch.deferred_at != self._engines.policy.num_updates:
            raise RuntimeError(
                f"algorithm={self._config.algorithm} updated the policy between log_probs and update of a "
                'batch; add "old_logprobs" to its NEEDS, so that log_probs computes them.'
            )
        return self._inference.old_outputs(batch, self._planner.plans(batch)[1:])

    def _check_schedule(
        self, model: TrainingEngine, optimizer: Optimizer, lr: float, warmup_steps: int
    ) -> None:
        """Note the learning rate, and compare that of the step before a resume with the present schedule.

        Raises WrongLearningRate if the same schedule gives another rate for that step than the one used.
        """
        name = next(name for name, other in self._engines.learning.items() if other is model)
        step, last = self._step.number, self._config.run.max_steps
        key = repr((optimizer, warmup_steps, None if optimizer.schedule == "constant" else last))
        before = self.rates.get(name)
        self.rates[name] = {"step": step, "rate": lr, "schedule": key}
        if before is None or before["step"] != step - 1 or before["schedule"] != key:
            return
        now = learning_rate(optimizer, step - 1 - warmup_steps, last - warmup_steps)
        if now != before["rate"]:
            raise WrongLearningRate(
                f"the learning rate of the {name} was {before['rate']:g} in step {step - 1}, but the same "
                f"schedule now gives {now:g} for that step: it does not continue where the checkpoint ended."
            )

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
                check_master_weights(name, model.stale_master_weights(), control_group())
                for part in model.parts:
                    part.check(model, name)

    def _mismatch_kl(self, mismatched: Batch, plan: MinibatchPlan) -> float:
        """Return the estimate of the KL divergence for a mini-batch under the current weights."""
        assert mismatched.mask is not None and mismatched.ref_logprobs is not None
        (logprobs,) = self._engines.policy.forward(mismatched, [plan.micro_batches], ("logprobs",))
        index, lengths = mismatched.tokens_of(plan.samples), mismatched.lengths[plan.samples]
        pair = logprobs[index], mismatched.ref_logprobs[index]
        return mismatch_kl(*pair, mismatched.mask[index], lengths)

    def _select_tokens(
        self, batch: Batch, plan: MinibatchPlan, select: TokenSelection, *, number: int
    ) -> None:
        """Fill `selected_tokens` for the samples of a mini-batch, before update `number` of this step."""
        samples, output = plan.samples, getattr(select, "reads", "logprobs")
        values = batch.old_logprobs if output == "logprobs" else None
        # Then old_logprobs belong to other weights, or are not filled yet.
        if number > 0 or self._config.rollout_correction.bypass or values is None:
            (values,) = self._engines.policy.forward(batch, [plan.micro_batches], (output,))
        index = batch.tokens_of(samples)
        batch.selected_tokens = torch.zeros(len(batch.mask))
        seed = seed_of(self._config.run.seed, "choose", self._step.number, number)
        batch.selected_tokens[index] = select(batch.select(samples), values[index], seed).float()


def _prefixed(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics with the prefix before names that have none."""
    return {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}
