"""Forward passes over a batch: log-probs of policy and reference, values, implicit rewards."""

from contextlib import nullcontext

from torch import Tensor

from rl.checks.checks import Checks
from rl.checks.rounding import rounded_again
from rl.config.needs import needs_reference
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.phases.batch_metrics import token_mean
from rl.phases.correction import reject, weights_of
from rl.phases.minibatches import MinibatchPlan, MinibatchPlanner
from rl.phases.old_logprobs import OUTPUTS, OldLogprobs
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
        old_logprobs: OldLogprobs,
    ):
        self._config, self._step, self._engines = config, step, engines
        self._memory, self._planner, self._checks = memory, planner, checks
        self._old = old_logprobs
        self._values_at: int | None = None
        """Number of the critic's updates when the last `old_values` were computed."""

    def log_probs(self, batch: Batch) -> None:
        """Fill `old_logprobs` and, if the config has a reference policy, `ref_logprobs`.

        Computes the log-probs with the current weights and applies `rollout_correction`. If the step has only
        one update, and nothing reads `old_logprobs` before this update, the update fills `old_logprobs`
        (`Updates.policy`). With `rollout_correction.bypass`, `old_logprobs` is a copy of the engine's
        log-probs instead.
        """
        policy, config, correction = self._engines.policy, self._config, self._config.rollout_correction
        self._measure_noise(batch)
        estimator, _ = config.objective.chosen
        needs_squares = estimator is not None and "sum_p_squared" in estimator.columns
        if correction.bypass:
            batch.old_logprobs = batch.column("rollout_logprobs").clone()
        elif self._old.may_defer(batch):
            batch.deferred_at = policy.num_updates
        else:
            names = (*OUTPUTS, "sum_p_squared") if needs_squares else OUTPUTS
            outputs = self._pass(policy, batch, names, "old_log_prob", "logp")
            if needs_squares:
                batch.extra["sum_p_squared"] = outputs[2]
            logprobs, entropy = outputs[:2]
            self._old.fill(batch, logprobs, entropy, weights_of(batch, logprobs, correction))
            self._step.metrics |= reject(batch, correction)
        if needs_reference(config):
            self.reference(batch)

    def _measure_noise(self, batch: Batch) -> None:
        """Measure rounding noise by two passes over a few samples, if a measurement is due."""
        noise, policy, counted = self._checks.noise, self._engines.policy, self._checks.sampled_now(batch)
        if noise is None or counted is None:
            return
        plan = noise.plan(self._planner.plans(batch)[0].micro_batches, batch, counted)
        if plan is not None:
            passes: list[Tensor] = []
            for context in (nullcontext(), rounded_again(policy)):
                with context:
                    few = [MinibatchPlan(plan)]
                    passes += self._pass(policy, batch, ("logprobs",), "old_log_prob", "noise", plans=few)
            noise.measure(plan, batch, counted, passes)

    def has_old_outputs(self, name: str) -> bool:
        """Return whether the last old outputs of a model were computed under its present weights."""
        computed_at = {"policy": self._old.computed_at, "critic": self._values_at}.get(name)
        return self._engines.training[name].num_updates == computed_at

    def reference(self, batch: Batch) -> None:
        """Fill `ref_logprobs`: log-probs under the policy that the run started from."""
        policy = self._engines.policy
        (batch.ref_logprobs,) = self._pass(policy, batch, ("logprobs",), "ref", "ref", of_reference=True)
        plans = [plan.micro_batches for plan in self._planner.plans(batch)]
        self._checks.log_probs(batch, plans, reference=True)

    def values(self, batch: Batch) -> None:
        """Fill `old_values`: the critic's values before this step's updates."""
        critic = self._engines.training["critic"]
        (batch.extra["old_values"],) = self._pass(critic, batch, ("values",), "values", "values")
        self._values_at = critic.num_updates

    def present_logprobs(self, batch: Batch) -> Tensor:
        """Return the log-probs of a batch's tokens under the present weights, float32 [T].

        These log-probs are used for held-out responses. `run.mode=check` also computes them for a batch that
        the policy has just learned from.
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

        plans: the mini-batches to compute; None: all. Samples outside these mini-batches get outputs of 0.
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
                outputs = model.forward(batch, micro_batches, names, bar)
                self._checks.reference_of(model).take(batch, micro_batches[0])
                return outputs
