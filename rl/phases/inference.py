"""Forward passes over a batch: log-probs of policy and reference, values, implicit rewards."""

from contextlib import nullcontext

import torch
from torch import Tensor

from rl.checks.checks import Checks
from rl.checks.rounding import rounded_again
from rl.config.schema import Config, needs_early_logprobs, needs_reference
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.phases.batch_metrics import engine_gap, token_mean
from rl.phases.correction import correct_rollout
from rl.phases.deferred import OUTPUTS
from rl.phases.minibatches import MinibatchPlan, MinibatchPlanner
from rl.phases.step_record import StepRecord
from rl.training.engine import TrainingEngine


class Inference:
    """Forward passes of the training models, without gradients. Methods are collective over the world."""

    def __init__(
        self,
        config: Config,
        step: StepRecord,
        engines: Engines,
        memory: MemorySharing,
        planner: MinibatchPlanner,
        checks: Checks,
    ):
        self._config, self._step, self._engines = config, step, engines
        self._memory, self._planner, self._checks = memory, planner, checks
        self._filled_at: dict[str, int] = {}
        """Number of a model's updates when the last `old_logprobs` or `old_values` were computed."""

    def log_probs(self, batch: Batch) -> None:
        """Fill `old_logprobs` and, if the config has a reference policy, `ref_logprobs`.

        Computes them with the current weights and applies `rollout_correction`. If nothing reads
        `old_logprobs` before the first update, the update fills them (`Updates.policy`). With
        `rollout_correction.bypass`, `old_logprobs` is a copy of the engine's log-probs instead. With
        `model.numerics=bitwise` it is one too, which the first update compares with its own. A batch with the
        data's responses has no log-probs of the engine.
        """
        policy, config = self._engines.policy, self._config
        self._measure_noise(batch)
        estimator, _ = config.objective.chosen
        needs_squares = estimator is not None and "sum_p_squared" in estimator.columns
        if self._is_bitwise(batch):
            may_defer = not needs_squares and not config.objective.adaptive_entropy.target
        else:
            may_defer = not needs_early_logprobs(config)
        if config.rollout_correction.bypass:
            batch.old_logprobs = batch.rollout_logprobs.clone()
        elif may_defer and self._step.number > config.critic.warmup_steps:
            batch.deferred_at = policy.num_updates
            if self._is_bitwise(batch):
                batch.old_logprobs = batch.rollout_logprobs.clone()
        else:
            names = (*OUTPUTS, "sum_p_squared") if needs_squares else OUTPUTS
            outputs = self._pass(policy, batch, names, "old_log_prob", "logp")
            if needs_squares:
                batch.extra["sum_p_squared"] = outputs[2]
            self.fill_old_logprobs(batch, *outputs[:2])
        if needs_reference(config):
            self.reference(batch)

    def is_deferred(self, batch: Batch) -> bool:
        """Return whether `log_probs` left the `old_logprobs` of this batch to the next update.

        Raises RuntimeError if the policy was updated after `log_probs`.
        """
        if batch.deferred_at is None:
            return False
        if batch.deferred_at != self._engines.policy.num_updates:
            raise RuntimeError(
                f"algorithm={self._config.algorithm} updated the policy between log_probs and update of a "
                'batch; add "old_logprobs" to its NEEDS, so that log_probs computes them.'
            )
        return True

    def old_outputs(self, batch: Batch, plans: list[MinibatchPlan]) -> Tensor:
        """Return OUTPUTS of the current policy, float32 [2, T]; 0 for samples that are not in the plans.

        With `model.numerics=bitwise` all are 0: the log-probs of the engine stand for them.
        """
        if not plans or self._is_bitwise(batch):
            return torch.zeros(len(OUTPUTS), int(batch.lengths.sum()))
        outputs = self._pass(self._engines.policy, batch, OUTPUTS, "old_log_prob", "logp", plans=plans)
        return torch.stack(outputs)

    def fill_old_logprobs(
        self, batch: Batch, logprobs: Tensor, entropy: Tensor, *, first: MinibatchPlan | None = None
    ) -> None:
        """Fill `old_logprobs` and `loss_weights`, reject tokens, and log how engine and trainer differ.

        logprobs, entropy: under the policy before this step's updates, float32 [T]. first: the mini-batch
        whose update computed them, None if a pass did. With `model.numerics=bitwise` the log-probs of the
        other mini-batches remain the engine's.
        """
        metrics, mask = self._step.metrics, batch.mask
        if first is not None:
            computed = batch.tokens_of(first.samples)
            if self._is_bitwise(batch):
                mask = torch.zeros_like(mask).index_copy_(0, computed, mask[computed])
                logprobs = batch.rollout_logprobs.index_copy(0, computed, logprobs[computed])
        batch.old_logprobs, batch.deferred_at = logprobs, None
        self._filled_at["policy"] = self._engines.policy.num_updates
        metrics["actor/entropy"] = token_mean(entropy, mask)
        known = None if self._is_bitwise(batch) else entropy  # else only that of the first mini-batch is
        metrics |= engine_gap(batch, logprobs) | self._check(batch, reference=False, entropy=known)
        for warning in self._checks.warnings(metrics):
            self._step.progress.line(warning)
        metrics |= correct_rollout(batch, self._config.rollout_correction)

    def _measure_noise(self, batch: Batch) -> None:
        """Pass twice over a few samples, where the noise of rounding is to be measured."""
        noise, policy, counted = self._checks.noise, self._engines.policy, self._checks.sampled_now(batch)
        if noise is None or counted is None:
            return
        plan = noise.plan(self._planner.plans(batch)[0].micro_batches, batch, counted)
        if plan is not None:
            passes = []
            for context in (nullcontext(), rounded_again(policy)):
                with context:
                    few = [MinibatchPlan(plan)]
                    passes += self._pass(policy, batch, ("logprobs",), "old_log_prob", "noise", plans=few)
            noise.measure(plan, batch, counted, passes)

    def _is_bitwise(self, batch: Batch) -> bool:
        """Return whether the engine's log-probs of the batch are bitwise the policy's."""
        return self._config.model.numerics == "bitwise" and batch.rollout_logprobs is not None

    def has_old_outputs(self, name: str, batch: Batch) -> bool:
        """Return whether the batch has a model's outputs under its present weights.

        False if the first update fills them; until then the batch has the engine's.
        """
        is_deferred = name == "policy" and batch.deferred_at is not None
        return not is_deferred and self._engines.training[name].num_updates == self._filled_at.get(name)

    def _check(self, batch: Batch, *, reference: bool, entropy: Tensor | None = None) -> dict[str, float]:
        plans = [plan.micro_batches for plan in self._planner.plans(batch)]
        return self._checks.log_probs(batch, plans, reference=reference, entropy=entropy)

    def reference(self, batch: Batch) -> None:
        """Fill `ref_logprobs`: log-probs under the policy that the run started from."""
        policy = self._engines.policy
        (batch.ref_logprobs,) = self._pass(policy, batch, ("logprobs",), "ref", "ref", of_reference=True)
        self._check(batch, reference=True)

    def values(self, batch: Batch) -> None:
        """Fill `old_values`: the critic's values before this step's updates."""
        critic = self._engines.training["critic"]
        (batch.extra["old_values"],) = self._pass(critic, batch, ("values",), "values", "values")
        self._filled_at["critic"] = critic.num_updates

    def present_logprobs(self, batch: Batch) -> Tensor:
        """Return the log-probs of a batch's tokens under the present weights, float32 [T].

        For held-out responses, and for a batch that was learned from (`run.mode=check`).
        """
        plans = self._planner.new_plans(batch)
        (logprobs,) = self._pass(
            self._engines.policy, batch, ("logprobs",), "testing", "validation", plans=plans
        )
        return logprobs

    def implicit_rewards(self, batch: Batch) -> Tensor:
        """Return the implicit reward of each token, float32 [T], and fill `implicit_ref_logprobs`.

        The reward is beta times the log-ratio of the implicit reward model to its initial weights (PRIME,
        arXiv:2502.01456).
        """
        model, timing = self._engines.training["implicit_reward"], "implicit_reward"
        (logprobs,) = self._pass(model, batch, ("logprobs",), timing, timing)
        (initial,) = self._pass(model, batch, ("logprobs",), timing, timing, of_reference=True)
        batch.extra["implicit_ref_logprobs"] = initial
        rewards = self._config.implicit_reward.beta * (logprobs - initial)
        self._step.metrics["implicit_reward/reward/mean"] = token_mean(rewards, batch.mask)
        return rewards

    def _pass(
        self,
        model: TrainingEngine,
        batch: Batch,
        names: tuple[str, ...],
        timing: str,
        label: str,
        *,
        of_reference: bool = False,
        plans: list[MinibatchPlan] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the named outputs of the model at every response token, float32 [T] each.

        plans: the mini-batches to compute, None for all. Outputs of other samples are 0.
        """
        self._memory.to_training()
        plans = self._planner.plans(batch) if plans is None else plans
        micro_batches = [plan.micro_batches for plan in plans]
        if self._step.peak_tflops:
            self._step.operations[timing] += self._planner.operations(batch, plans, model)
        phase = self._step.phase("log_probs", timing=timing, batch=batch.hashes())
        with phase, self._step.bar(label, sum(len(plan.samples) for plan in plans)) as bar:
            if not of_reference:
                return model.forward(batch, micro_batches, names, bar)
            with model.reference_weights():
                return model.forward(batch, micro_batches, names, bar)
