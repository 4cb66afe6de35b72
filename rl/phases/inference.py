"""Forward passes over a batch: log-probs of policy and reference, values, implicit rewards."""

import torch
from torch import Tensor

from rl.config.schema import Config, algorithm_of, needs_early_logprobs, needs_reference
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.phases.batch_checks import check_likelihoods
from rl.phases.batch_metrics import engine_gap, token_mean
from rl.phases.correction import correct_rollout
from rl.phases.deferred import OUTPUTS
from rl.phases.logprob_checks import check_engine, check_reference, rounding_limit
from rl.phases.minibatches import MinibatchPlan, MinibatchPlanner
from rl.phases.step import Step
from rl.phases.zero_mismatch import check_equal
from rl.training.engine import TrainingEngine


class Inference:
    """Forward passes of the training models, without gradients. Methods are collective over the world."""

    def __init__(
        self, config: Config, step: Step, engines: Engines, memory: MemorySharing, planner: MinibatchPlanner
    ):
        self._config, self._step, self._engines = config, step, engines
        self._memory, self._planner = memory, planner
        self._is_bitwise = config.model.numerics == "bitwise"
        slack, weights = config.agreement.logprob_slack, engines.policy.weight_map
        self._limit = slack * rounding_limit(weights.hf, weights.dtype) if slack else 0.0
        """Largest mean difference of log-probs that rounding explains; 0: they are not compared."""
        self._filled_at: int | None = None
        """Number of the policy's updates when the last `old_logprobs` were computed."""

    def log_probs(self, batch: Batch) -> None:
        """Fill `old_logprobs` and, if the config has a reference policy, `ref_logprobs`.

        Computes them with the current weights and applies `rollout_correction`. If nothing reads
        `old_logprobs` before the first update, the update fills them (`Updates.policy`) and this method only
        stores the number of the policy's updates so far. With `rollout_correction.bypass`, `old_logprobs` is
        a copy of the engine's log-probs instead. With `model.numerics=bitwise` it is one too, which the first
        update compares with its own. A batch with the data's responses has no log-probs of the engine.
        """
        policy, config = self._engines.policy, self._config
        updates_policy = self._step.number > config.critic.warmup_steps
        estimator, _ = config.objective.chosen
        needs_squares = estimator is not None and "sum_p_squared" in estimator.columns
        needs_outputs = needs_squares or config.objective.adaptive_entropy.target > 0
        is_exact = self._is_exact(batch)
        if config.rollout_correction.bypass:
            batch.old_logprobs = batch.rollout_logprobs.clone()
        elif updates_policy and (not needs_early_logprobs(config) or is_exact and not needs_outputs):
            batch.deferred_at = policy.num_updates
            if is_exact:
                batch.old_logprobs = batch.rollout_logprobs.clone()
        else:
            names = (*OUTPUTS, "sum_p_squared") if needs_squares else OUTPUTS
            outputs = self._pass(policy, batch, names, "old_log_prob", "logp")
            batch.sum_p_squared = outputs[2] if needs_squares else None
            self.fill_old_logprobs(batch, *outputs[:2])
        if needs_reference(config):
            self.reference(batch)

    def old_outputs(self, batch: Batch, plans: list[MinibatchPlan]) -> Tensor:
        """Return OUTPUTS of the current policy, float32 [2, T]; 0 for samples that are not in the plans.

        With `model.numerics=bitwise` the log-probs are the engine's, and the entropies are 0.
        """
        if self._is_exact(batch):
            return torch.stack([batch.rollout_logprobs, torch.zeros_like(batch.rollout_logprobs)])
        if not plans:
            return torch.zeros(len(OUTPUTS), int(batch.lengths.sum()))
        outputs = self._pass(self._engines.policy, batch, OUTPUTS, "old_log_prob", "logp", plans=plans)
        return torch.stack(outputs)

    def fill_old_logprobs(
        self, batch: Batch, logprobs: Tensor, entropy: Tensor, *, first: MinibatchPlan | None = None
    ) -> None:
        """Fill `old_logprobs` and `loss_weights`, reject tokens, and log how engine and trainer differ.

        logprobs, entropy: under the policy before this step's updates, float32 [T]. first: the mini-batch
        whose update computed them, None if a pass computed those of all.

        Raises NumericsDiffer if `model.numerics=bitwise` and a log-prob is not the engine's.
        """
        metrics, mask = self._step.metrics, batch.mask
        batch.old_logprobs, batch.deferred_at = logprobs, None
        self._filled_at = self._engines.policy.num_updates
        if self._config.run.mode != "train_only":  # a replayed policy may have learned from these tokens
            version = self._engines.policy.version if self._selects else None
            check_likelihoods(batch, logprobs, name="old policy", version=version)
        if self._is_exact(batch):
            plans = self._planner.plans(batch) if first is None else [first]
            run = self._config.run
            check_equal(
                batch,
                logprobs,
                self._engines.policy.version,
                [plan.micro_batches for plan in plans],
                replayed=run.rollouts if run.mode == "train_only" else "",
            )
            if first is not None:  # entropies of other samples are not computed
                mask = torch.zeros_like(mask).index_copy_(0, own := batch.tokens_of(first.samples), mask[own])
        metrics["actor/entropy"] = token_mean(entropy, mask)
        metrics |= engine_gap(batch, logprobs)
        self._check_logprobs(batch, logprobs)
        metrics |= correct_rollout(batch, self._config.rollout_correction)

    def _is_exact(self, batch: Batch) -> bool:
        """Return whether the engine's log-probs of the batch are bitwise the policy's."""
        return self._is_bitwise and batch.rollout_logprobs is not None

    def has_old_logprobs(self, batch: Batch) -> bool:
        """Return whether `old_logprobs` are of the present weights, or the first update fills them."""
        return self._engines.policy.num_updates in (batch.deferred_at, self._filled_at)

    def reference(self, batch: Batch) -> None:
        """Fill `ref_logprobs`: log-probs under the policy that the run started from."""
        policy = self._engines.policy
        (batch.ref_logprobs,) = self._pass(policy, batch, ("logprobs",), "ref", "ref", of_reference=True)
        config = self._config
        selects = self._selects or config.roles.is_on or config.rollout_correction.rejections
        # Else the tokens that are missing may have smaller ratios.
        if not selects and config.run.mode != "train_only":
            check_likelihoods(batch, batch.ref_logprobs, name="reference policy")
        self._check_reference(batch)

    @property
    def _selects(self) -> bool:
        """Whether samples enter a batch by their results or lengths."""
        config = self._config
        return "dynamic_sampling" in algorithm_of(config).needs or config.rollout.carry_over

    def _check_logprobs(self, batch: Batch, logprobs: Tensor) -> None:
        """Compare the policy's log-probs with the engine's and the reference's, where they must be equal."""
        policy, rollout = self._engines.policy, self._config.rollout
        is_biased = rollout.truncates and rollout.biased_truncation
        is_biased |= self._config.agents.structured_tool_calls  # the engine samples from allowed tokens only
        if self._limit and not is_biased and self._config.run.mode != "train_only":
            plans = [plan.micro_batches for plan in self._planner.plans(batch)]
            ranks = [[i for p in plans for micro in p[r] for i in micro] for r in range(policy.grid.dp)]
            routes = policy.weight_map.placement.num_experts > 0
            found = check_engine(
                batch,
                logprobs,
                version=policy.version,
                limit=self._limit,
                routes=routes,
                keeps_cache="keep" in (rollout.carry_over_cache, self._config.roles.cache),
                ranks=ranks,
            )
            self._step.metrics |= found
        self._check_reference(batch)

    def _check_reference(self, batch: Batch) -> None:
        """Compare policy and reference before the policy's first update; `batch` may lack either."""
        if self._limit and self._engines.policy.version == 0 and not self._config.rollout_correction.bypass:
            check_reference(batch, limit=self._limit)

    def values(self, batch: Batch) -> None:
        """Fill `old_values`: the critic's values before this step's updates."""
        (batch.old_values,) = self._pass(
            self._engines.training["critic"], batch, ("values",), "values", "values"
        )

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
        phase = self._step.phase("log_probs", timing=timing, batch=batch.fingerprint)
        with phase, self._step.bar(label, sum(len(plan.samples) for plan in plans)) as bar:
            if not of_reference:
                return model.forward(batch, micro_batches, names, bar)
            with model.reference_weights():
                return model.forward(batch, micro_batches, names, bar)
