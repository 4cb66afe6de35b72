"""Forward passes over a batch: log-probs of policy and reference, values, implicit rewards."""

from torch import Tensor

from rl.config.schema import Config, needs_reference
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.phases.batch_metrics import engine_gap, token_mean
from rl.phases.correction import correct_rollout
from rl.phases.minibatches import MinibatchPlanner
from rl.phases.step import Step
from rl.training.engine import TrainingEngine


class Inference:
    """Forward passes of the training models, without gradients. Methods are collective over the world."""

    def __init__(
        self, config: Config, step: Step, engines: Engines, memory: MemorySharing, planner: MinibatchPlanner
    ):
        self._config, self._step, self._engines = config, step, engines
        self._memory, self._planner = memory, planner

    def log_probs(self, batch: Batch) -> None:
        """Fill `old_logprobs` and, if the config has a reference policy, `ref_logprobs`.

        Computes them with the current weights and applies `rollout_correction`. With
        `rollout_correction.bypass`, `old_logprobs` is a copy of the engine's log-probs instead.
        """
        if self._config.rollout_correction.bypass:
            batch.old_logprobs = batch.rollout_logprobs.clone()
        else:
            estimator, _ = self._config.objective.chosen
            needs_squares = estimator is not None and "sum_p_squared" in estimator.columns
            names = ("logprobs", "entropy", *(("sum_p_squared",) if needs_squares else ()))
            batch.old_logprobs, entropy, *squares = self._pass(
                self._engines.policy, batch, names, "old_log_prob", "logp"
            )
            batch.sum_p_squared = squares[0] if squares else None
            metrics = self._step.metrics
            metrics["actor/entropy"] = token_mean(entropy, batch.mask)
            metrics |= engine_gap(batch, batch.old_logprobs)
            metrics |= correct_rollout(batch, self._config.rollout_correction)
        if needs_reference(self._config):
            self.reference(batch)

    def reference(self, batch: Batch) -> None:
        """Fill `ref_logprobs`: log-probs under the policy that the run started from."""
        policy = self._engines.policy
        (batch.ref_logprobs,) = self._pass(policy, batch, ("logprobs",), "ref", "ref", of_reference=True)

    def values(self, batch: Batch) -> None:
        """Fill `old_values`: the critic's values before this step's updates."""
        assert self._engines.critic is not None, "this run has no critic"
        (batch.old_values,) = self._pass(self._engines.critic, batch, ("values",), "values", "values")

    def implicit_rewards(self, batch: Batch) -> Tensor:
        """Return the implicit reward of each token, float32 [T], and fill `implicit_ref_logprobs`.

        The reward is beta times the log-ratio of the implicit reward model to its initial weights (PRIME,
        arXiv:2502.01456).
        """
        model, timing = self._engines.implicit_reward, "implicit_reward"
        assert model is not None, "this run has no implicit reward model"
        (logprobs,) = self._pass(model, batch, ("logprobs",), timing, timing)
        (batch.implicit_ref_logprobs,) = self._pass(
            model, batch, ("logprobs",), timing, timing, of_reference=True
        )
        rewards = self._config.implicit_reward.beta * (logprobs - batch.implicit_ref_logprobs)
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
    ) -> tuple[Tensor, ...]:
        """Return the named outputs of the model at every response token, float32 [T] each."""
        self._memory.to_training()
        plans = [plan.micro_batches for plan in self._planner.plans(batch)]
        phase = self._step.phase("log_probs", timing=timing, batch=batch.fingerprint)
        with phase, self._step.bar(label, len(batch)) as bar:
            if not of_reference:
                return model.forward(batch, plans, names, bar)
            with model.reference_weights():
                return model.forward(batch, plans, names, bar)
