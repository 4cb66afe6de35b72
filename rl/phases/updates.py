"""The update phase: optimizer steps on the mini-batches of a batch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from rl.checks.advantages import check_entropy_coef
from rl.checks.checks import Checks
from rl.checks.updates import check_divergence, check_present
from rl.config.schema import Config, Optimizer
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.objectives.aggregate import aggregate
from rl.objectives.entropy_controller import EntropyController
from rl.objectives.preference import mismatch_kl
from rl.objectives.segments import expand, segment_sum
from rl.objectives.value_loss import explained_variance, value_loss
from rl.phases.batch_metrics import balance_metrics, imbalance_metrics, spread
from rl.phases.inference import Inference
from rl.phases.minibatches import MinibatchPlan, MinibatchPlanner, samples_by_rank
from rl.phases.old_logprobs import OldLogprobs
from rl.phases.policy_gradient import with_entropy_bonus
from rl.phases.step_record import StepRecord
from rl.rollout.sampling import seed_of
from rl.training.learning_rate import RateSchedule
from rl.training.loss import Loss, LossFunction, TokenSelection, Totals
from rl.training.packing import MicroBatch


def adaptive_entropy(config: Config) -> EntropyController | None:
    """Return the controller of `objective.adaptive_entropy`, or None if the weight is fixed."""
    control = config.objective.adaptive_entropy
    if not control.target:
        return None
    bounds = dict(low=control.low, high=control.high)
    return EntropyController(
        config.objective.entropy_coef, target=control.target, delta=control.delta, **bounds
    )


class Updates:
    """Makes `training.epochs` passes over the mini-batches, with one optimizer step on each mini-batch.

    For example, training.epochs=2 and four mini-batches are eight optimizer steps.

    Methods are collective over the world.
    """

    def __init__(
        self,
        config: Config,
        step: StepRecord,
        engines: Engines,
        memory: MemorySharing,
        planner: MinibatchPlanner,
        inference: Inference,
        checks: Checks,
        old_logprobs: OldLogprobs,
    ):
        self._config, self._step, self._engines, self._memory = config, step, engines, memory
        self._planner, self._inference, self._checks = planner, inference, checks
        self._old_logprobs = old_logprobs
        self.entropy_control = adaptive_entropy(config)
        """Weight of the entropy bonus, or None if it is `objective.entropy_coef`."""
        self._measured = dict[int, float]()
        """Number of the policy's updates -> KTO's estimate before the next one."""

    def plans(self, batch: Batch) -> list[MinibatchPlan]:
        """Return one plan per mini-batch, in the order of the optimizer steps."""
        return self._planner.plans(batch)

    def policy(
        self,
        batch: Batch,
        loss: Loss | LossFunction,
        *,
        select_tokens: TokenSelection | None = None,
        mismatched: Batch | None = None,
    ) -> None:
        """Update the policy.

        If `Inference.log_probs` deferred the old log-probs, they come from the update's own forward pass.

        select_tokens: called before each update with the whole mini-batch; the loss reads the result as the
        column `selected_tokens`.
        mismatched: the result of `Phases.mismatched`, with `ref_logprobs` filled. The loss gets the argument
        `kl`: `mismatch_kl` of the mini-batch's mismatched samples under the current weights.

        With `objective.adaptive_entropy` an entropy bonus is added to the loss.
        """
        config, policy, loss = self._config, self._engines.policy, Loss.of(loss)
        schedule = self._begin("policy", config.training.optimizer, config.critic.warmup_steps)
        self._complete(batch)
        plans, first_update = self._planner.plans(batch), policy.num_updates
        self._log_batch(batch, plans)
        if self.entropy_control is not None:
            entropy, before = self._step.metrics["actor/entropy"], self.entropy_control.coef
            weight = self.entropy_control.update(entropy)
            found = weight, self.entropy_control.coef
            check_entropy_coef(config.objective.adaptive_entropy, entropy, before, found)
            self._step.metrics["actor/entropy_coef"] = weight
            loss = with_entropy_bonus(loss, config, weight) if weight else loss
        others = [] if mismatched is None else self._planner.new_plans(mismatched)
        only_update = self._old_logprobs.only_update(batch, loss)

        @contextmanager
        def update_of(plan: MinibatchPlan) -> Iterator[Loss]:
            number = policy.num_updates - first_update
            if select_tokens is not None:
                self._select_tokens(batch, plan, select_tokens, number=number)
            if mismatched is not None:
                kl = self._mismatch_kl(mismatched, others[plans.index(plan)])
                check_present(kl, self._measured, policy.num_updates)
                yield loss.given(kl=kl)
            elif only_update is not None:
                yield only_update.loss
                self._old_logprobs.fill(batch, *only_update.outputs(policy, batch))
            else:
                yield loss

        means = self._learn("policy", batch, loss, schedule, timing="update_actor", update_of=update_of)
        policy.version += 1
        if not batch.mask.any():
            text = "no token of the batch counts in the loss, so the policy does not learn in this step"
            self._step.progress.line(f"warning: update check: {text}; see the masks, rejections and limits.")
        self._step.metrics |= _prefixed("actor", means)
        if "actor/kl_loss" in self._step.metrics:
            self._step.metrics["actor/kl_coef"] = config.objective.kl_coef

    def critic(self, batch: Batch) -> None:
        """Update the critic with the value loss; reads `returns` and `old_values`."""
        loss = Loss(partial(critic_loss, clip=self._config.critic.value_clip), reads=("values",))
        schedule = self._begin("critic", self._config.critic.optimizer)
        means = self._learn("critic", batch, loss, schedule, timing="update_critic")
        metrics, counted = self._step.metrics, batch.mask > 0
        values, returns = batch.column("old_values"), batch.column("returns")
        metrics |= _prefixed("critic", means)
        metrics |= spread("critic/values", values[counted])
        metrics |= spread("critic/returns", returns[counted])
        metrics["critic/vf_explained_var"] = explained_variance(values, returns, batch.mask)

    def implicit_reward(self, batch: Batch, loss: Loss | LossFunction) -> None:
        """Update the implicit reward model; reads `labels` and `implicit_ref_logprobs`."""
        name, loss = "implicit_reward", Loss.of(loss)
        schedule = self._begin(name, self._config.implicit_reward.optimizer)
        means = self._learn(name, batch, loss, schedule, timing=f"update_{name}")
        self._step.metrics |= _prefixed(name, means)

    def _begin(self, name: str, optimizer: Optimizer, warmup_steps: int = 0) -> RateSchedule:
        """Prepare the update of a model and check its weights; return its learning rates.

        warmup_steps: number of steps before the learning rate schedule of this model starts.
        """
        step, every = self._step, self._config.agreement.weights_every
        self._memory.to_training()
        step.is_committed = True
        schedule = RateSchedule(optimizer, self._config.run.max_steps, warmup_steps)
        if every and (step.number % every == 0 or step.is_first_of_start):
            with step.timed("agreement"):
                self._checks.weights(name, self._engines.training[name])
        return schedule

    def _complete(self, batch: Batch) -> None:
        """Fill the column that holds the size of each trajectory."""
        if batch.trajectories is not None:
            counts = segment_sum(batch.mask.double(), batch.trajectory_lengths)
            batch.extra["trajectory_tokens"] = expand(batch.of_trajectories(counts).float(), batch.lengths)

    def _log_batch(self, batch: Batch, plans: list[MinibatchPlan]) -> None:
        """Log the advantages, and how evenly the ranks share the tokens."""
        step, num_tokens = self._step, batch.prompt_lengths + batch.lengths
        if batch.advantages is not None:
            step.metrics |= spread("critic/advantages", batch.advantages[batch.mask > 0])
        step.metrics |= balance_metrics(num_tokens.tolist(), samples_by_rank(plans))
        step.metrics |= imbalance_metrics([plan.costs for plan in plans if plan.costs is not None])
        step.num_tokens += int(num_tokens.sum())

    def _learn(
        self,
        name: str,
        batch: Batch,
        loss: Loss,
        schedule: RateSchedule,
        *,
        timing: str,
        update_of: Callable[[MinibatchPlan], AbstractContextManager[Loss]] | None = None,
    ) -> dict[str, float]:
        """Update one model; return the loss's metrics, averaged over the updates, and the learning rate.

        update_of: returns a context manager that encloses the update on one mini-batch and yields its loss.
            None: `loss` is used for all mini-batches.
        """
        model = self._engines.training[name]
        step, epochs, plans = self._step, self._config.training.epochs, self._planner.plans(batch)
        sums: dict[str, float] = {}
        lr = schedule.rate(step.number)
        if model is self._engines.policy:
            self._memory.wait_for_readers()  # not earlier: passes may overlap the reading
        is_first = self._inference.has_old_outputs(name)
        phase = step.phase("update", timing=timing, batch=batch.hashes())
        with phase, step.bar("train", len(batch) * epochs) as bar:
            checks = self._checks.before_update(
                name,
                model,
                batch,
                loss,
                lr,
                step=step.number,
                plans=[plan.micro_batches for plan in plans],
                is_first=is_first,
            )
            for plan in plans * epochs:
                with update_of(plan) if update_of else nullcontext(loss) as loss:
                    totals = plan.totals(batch)
                    micros = plan.micro_batches
                    outputs = checks.begin(partial(loss, totals=totals), totals, micros, loss.reads)
                    result = model.update(
                        batch, micros, checks.micro_batch, lr=lr, outputs=outputs, progress=bar
                    )
                    checks.end(result)
                for metric, value in (result.metrics | {"grad_norm": result.grad_norm}).items():
                    sums[metric] = sums.get(metric, 0.0) + value
        if step.peak_tflops:
            step.operations[timing] += epochs * self._planner.update_operations(batch, plans, model)
        num_updates = len(plans) * epochs
        return {name: value / num_updates for name, value in sums.items()} | {"lr": lr}

    def _mismatch_kl(self, mismatched: Batch, plan: MinibatchPlan) -> float:
        """Return the estimate of the KL divergence for a mini-batch under the current weights."""
        assert mismatched.mask is not None and mismatched.ref_logprobs is not None
        (logprobs,) = self._engines.policy.forward(mismatched, [plan.micro_batches], ("logprobs",))
        index, lengths = mismatched.tokens_of(plan.samples), mismatched.lengths[plan.samples]
        pair = logprobs[index], mismatched.ref_logprobs[index]
        found = mismatch_kl(*pair, mismatched.mask[index], lengths)
        check_divergence(found, mismatched, plan.samples, logprobs)
        self._measured = {self._engines.policy.num_updates: found}
        return found

    def _select_tokens(
        self, batch: Batch, plan: MinibatchPlan, select: TokenSelection, *, number: int
    ) -> None:
        """Fill `selected_tokens` for the samples of a mini-batch, before update `number` of this step."""
        samples, output = plan.samples, select.reads
        values = batch.old_logprobs if output == "logprobs" else None
        # In these cases old_logprobs belong to other weights, or are not filled yet.
        if number > 0 or self._config.rollout_correction.bypass or values is None:
            (values,) = self._engines.policy.forward(batch, [plan.micro_batches], (output,))
        index = batch.tokens_of(samples)
        selected = torch.zeros(len(batch.mask))
        seed = seed_of(self._config.run.seed, "choose", self._step.number, number)
        selected[index] = select.function(batch.select(samples), values[index], seed).float()
        batch.extra["selected_tokens"] = selected


def critic_loss(micro: MicroBatch, totals: Totals, *, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the value loss and its metrics. The loss is a mean over tokens."""
    token_loss, stats = value_loss(
        micro.values, micro.column("old_values"), micro.column("returns"), micro.mask, clip=clip
    )
    num_tokens, num_samples = totals.num_tokens, totals.num_samples
    value = aggregate(
        token_loss, micro.mask, micro.lengths, "token-mean", num_tokens=num_tokens, num_samples=num_samples
    )
    fractions = {name: stats[name] / num_tokens for name in ("vf_clipfrac", "vpred_mean")}
    return value, {"vf_loss": value} | fractions


def _prefixed(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics; names without a prefix get this prefix."""
    return {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}
