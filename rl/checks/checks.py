"""Compares the results of a step with a second source, at several moments of the step (docs/checks.md)."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rl.checks import batches, logprobs
from rl.checks.advantages import check_advantages, check_baselines
from rl.checks.causes import cause_of
from rl.checks.head import check_head
from rl.checks.objective import check_loss
from rl.checks.precision import check_columns, check_precision
from rl.checks.reference import SecondPass, check_foresight
from rl.checks.rounding import RoundingNoise
from rl.checks.slope import SlopeCheck
from rl.checks.updates import UpdateChecks, WrongLearningRate, check_coverage, expected_rate
from rl.config.declarations import shipped
from rl.config.needs import algorithm_of
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.faults.agreement import check_master_weights, check_replicas
from rl.refit.refit import what_is_equal
from rl.runtime.session import control_group
from rl.training.engine import TrainingEngine
from rl.training.loss import Loss
from rl.training.micro_batch_plans import MicroBatchPlan, samples_of

SEEDS_OF_CALLS = 16
"""Number of earlier calls of the engine with whose seeds new seeds are compared."""


class StartState(Protocol):
    digest: str

    def check(self, name: str, model: TrainingEngine) -> None: ...


class Checks:
    """The checks of a run. Every rank calls each method with the same arguments and raises the same error.

    policy: the model that learns from the samples. end_ids: ids of tokens that end a response, besides
    `rollout.stop_token_ids`.
    """

    def __init__(self, config: Config, policy: TrainingEngine, end_ids: frozenset[int]):
        self._config, self._policy, self._end_ids = config, policy, end_ids
        slack, weights = config.agreement.logprob_slack, policy.weight_map
        coarser = logprobs.FP8_FACTOR if config.rollout.quantization == "fp8" else 1
        self._limit = slack * logprobs.rounding_limit(weights.hf, weights.dtype)
        self._engine_limit = self._limit * coarser
        """Maximum mean difference to the engine, relative to the size of log-probs. 0: not compared."""
        is_measured = slack > 0 and weights.dtype is torch.bfloat16 and config.model.numerics != "bitwise"
        is_measured &= config.training.router_replay != "engine"  # its own check names the layer
        factor = slack * coarser
        self.noise = RoundingNoise(policy.grid.micro_batch_multiple, factor) if is_measured else None
        self.start: StartState | None = None
        """State at the start of the run; None if the run keeps no checkpoints."""
        self.everything: Batch | None = None
        """All samples of the step, with scores, if an algorithm learns from only some of them."""
        self._greedy: Batch | None = None
        """Greedy responses of the step, whose rewards are baselines."""
        self._seeds: deque[frozenset[int]] = deque(maxlen=SEEDS_OF_CALLS)
        # Whether log-probs are not those of the distribution that tokens are drawn from.
        self._is_biased = config.rollout.truncates and config.rollout.biased_truncation
        self._is_biased |= config.agents.structured_tool_calls  # the engine samples from allowed tokens only
        # Whether samples enter the batch because of their results or lengths.
        self._selects = "dynamic_sampling" in algorithm_of(config).needs or config.rollout.carry_over
        self._updates: UpdateChecks | None = None
        """Those of the policy's last step in this start."""
        self._has_moved = False
        """Whether an earlier step of this start has moved the policy's weights."""
        self._checked: set[str] = set()
        """Checks of this process that are not repeated: "foresight", and models with a compared loss."""
        self._slopes: dict[str, SlopeCheck] = {}
        self._references: dict[TrainingEngine, SecondPass] = {}
        self._entropy = logprobs.DrawnEntropy(weights.hf["vocab_size"])
        batches.check_uniforms()

    def generated(self, batch: Batch, *, limits_vary: bool) -> None:
        """Check groups, endings, sampling parameters and seeds of all samples: an algorithm may drop some.

        limits_vary: whether samples may have been generated with different length limits.
        """
        rollout = self._config.rollout
        # With other limits, an earlier run may have sampled with other parameters, too.
        self._samples(batch, rollout.samples_per_prompt, "" if limits_vary else "training")
        if rollout.temperature:
            self._seeds.append(batches.check_seeds(batch, self._seeds))
            if not self._is_biased and self._config.run.mode != "train_only":
                logprobs.check_repeats(batch)

    def validated(
        self, batch: Batch, prompts: Sequence[Prompt], *, samples_per_prompt: int, is_greedy: bool
    ) -> None:
        """Check a validation's scored samples. prompts: the prompts of the validation, in order."""
        batches.check_held_out(prompts, self._config)
        self._ordered(batch, prompts, samples_per_prompt, "greedy" if is_greedy else "validation")
        batches.check_digests(batch)

    def greedy(self, batch: Batch, prompts: Sequence[Prompt]) -> None:
        """Check the greedy responses to the prompts of a step."""
        self._ordered(batch, prompts, 1, "greedy")
        self._greedy = batch

    def _ordered(
        self, batch: Batch, prompts: Sequence[Prompt], samples_per_prompt: int, purpose: str
    ) -> None:
        batches.check_staleness(batch, self._policy.version, 0)
        self._samples(batch, samples_per_prompt, purpose)
        batches.check_order(batch, prompts, samples_per_prompt=samples_per_prompt)

    def _samples(self, batch: Batch, samples_per_prompt: int, purpose: str) -> None:
        """Check what all samples have in common. purpose: see `check_sampling`; "": limits may vary."""
        rollout = self._config.rollout
        if purpose:
            batches.check_sampling(batch, self._config, purpose)
            batches.check_turns(batch, self._config.agents)
        batches.check_groups(batch, samples_per_prompt=samples_per_prompt)
        stop_ids = self._end_ids | set(rollout.stop_token_ids)
        batches.check_endings(batch, rollout, stop_ids, limits_vary=not purpose)

    def log_probs(
        self, batch: Batch, plans: list[MicroBatchPlan], *, reference: bool, entropy: Tensor | None = None
    ) -> dict[str, float]:
        """Check `old_logprobs`, or, with `reference`, `ref_logprobs`. Return metrics of the differences.

        plans: the mini-batches, from which the data parallel rank of a sample is known. entropy: entropy of
            the policy at each token, float32 [T]; None if it is unknown.
        """
        config, is_replay = self._config, self._config.run.mode == "train_only"
        found: dict[str, float] = {}
        own = self._updates if self._updates is not None and self._updates.batch is batch else None
        if own is not None and own.number > 1 and not reference:
            raise batches.CheckFailed(
                f"ratio check: old_logprobs were computed in update {own.number} of their step, but with "
                "several updates they need a pass of their own before the first."
            )
        if reference:
            self.reference_of(self._policy).check(batch, batch.column("ref_logprobs"))
        else:
            if config.model.numerics == "bitwise" and batch.rollout_logprobs is not None:
                replayed = config.run.rollouts if is_replay else ""
                logprobs.check_equal(batch, self._policy.version, plans, replayed)
            found = self._against_engine(batch, plans, entropy)
        # Policy and reference are equal as long as the policy has not learned.
        if self._limit and self._policy.version == 0 and not config.rollout_correction.bypass:
            logprobs.check_reference(batch, limit=self._limit)
        # The only update of a step may fill `old_logprobs`, which are of the weights before it.
        last = self._updates if own is None else None
        if not is_replay and (self._has_moved or (last is not None and last.has_moved)):
            logprobs.check_moved(batch)
        return found

    def before_update(
        self,
        name: str,
        model: TrainingEngine,
        batch: Batch,
        loss: Loss,
        lr: float,
        *,
        step: int,
        plans: list[MicroBatchPlan],
        is_first: bool,
    ) -> UpdateChecks:
        """Check the batch that a model is about to learn from, the loss, and the learning rate.

        Returns the checks for the updates of this step. name: name of the model, for example "policy". plans:
        the mini-batches. lr, is_first: see `UpdateChecks`.
        """
        batches.check_digests(batch)
        check_columns(batch)
        is_shipped = self._config.algorithm in shipped()
        batches.check_rejections(batch, self._config.rollout_correction, loses_nothing=is_shipped)
        check_coverage(batch, plans)
        self._check_rate(name, model, lr, step)
        columns = {"policy": batch.ref_logprobs, "implicit_reward": batch.extra.get("implicit_ref_logprobs")}
        if (column := columns.get(name)) is not None:
            self.reference_of(model).check(batch, column)
        self._objective(name, model, batch, loss)
        if name == "critic" and "foresight" not in self._checked:
            self._checked |= {"foresight"} if check_foresight(model, batch, plans[0]) else set()
        output = "values" if name == "critic" else "logprobs"
        slope = self._slopes.setdefault(name, SlopeCheck(model, output))
        slope.check(batch, plans[0], noise=self.noise.noise if self.noise and name == "policy" else None)
        own = self._config if name == "policy" else None
        updates = UpdateChecks(model, batch, lr, is_first=is_first, config=own)
        if name == "policy":
            self._has_moved |= self._updates is not None and self._updates.has_moved
            self._updates = updates
        return updates

    def _check_rate(self, name: str, model: TrainingEngine, lr: float, step: int) -> None:
        """Raise WrongLearningRate if a model has another rate or optimizer than its section of the config."""
        config = self._config
        sections = {
            "policy": config.training.optimizer,
            "critic": config.critic.optimizer,
            "implicit_reward": config.implicit_reward.optimizer,
        }
        own, warmup = sections[name], config.critic.warmup_steps if name == "policy" else 0
        expected = expected_rate(own, step - warmup, config.run.max_steps - warmup)
        is_equal = math.isclose(lr, expected, rel_tol=1e-9, abs_tol=1e-9 * own.lr)
        if not is_equal or model.spec.optimizer != own:
            raise WrongLearningRate(
                f"the schedule gives the {name} the learning rate {lr:g} in step {step} of "
                f"{config.run.max_steps}, with {model.spec.optimizer}, but the config {expected:g}, {own}: "
                "the schedule restarted, advances twice, decays over other steps, or is another model's."
            )

    def reference_of(self, model: TrainingEngine) -> SecondPass:
        """Return the checks of a model's passes with the reference weights."""
        slack = self._config.agreement.logprob_slack
        return self._references.setdefault(model, SecondPass(model, slack))

    def weights(self, name: str, model: TrainingEngine) -> None:
        """Check that all ranks hold equal weights, and the model's parts.

        An update would overwrite a different copy with the owner's, so it would be too late afterwards.
        """
        check_replicas(name, model.replicas(), control_group())
        check_master_weights(name, model.stale_master_weights(), control_group())
        if self.start is not None:
            self.start.check(name, model)
        for part in model.parts:
            part.check(model, name)
        for other, belonging in model.parts.models().items():
            if belonging.optimizer is not None:
                self.weights(other, belonging)

    def sampled_now(self, batch: Batch) -> Tensor | None:
        """Return the tokens at which trainer and engine must agree, bool [T]; None if nothing is compared."""
        config, rollout = self._config, self._config.rollout
        is_replay = config.run.mode == "train_only"  # the policy may have learned from these tokens
        if not self._limit or self._is_biased or is_replay or batch.rollout_logprobs is None:
            return None
        # For tokens sampled after a change of weights, older weights computed a part of the cache, or chose
        # the experts of the first turns.
        keeps_cache = "keep" in (rollout.carry_over_cache, config.roles.cache)
        whole = keeps_cache or config.training.router_replay == "engine"
        return logprobs.present_tokens(batch, self._policy.version, whole=whole)

    def _against_engine(
        self, batch: Batch, plans: list[MicroBatchPlan], entropy: Tensor | None
    ) -> dict[str, float]:
        """Compare the policy's log-probs with the engine's, where they must be equal."""
        counted, policy = self.sampled_now(batch), self._policy
        if counted is None:
            return {}

        def explain(limit: float) -> str:
            tp = self._config.rollout.tp
            cause = cause_of(policy, batch, plans, counted, limit=limit, engine_tp=tp)
            return f"{what_is_equal(policy)}. {cause}"

        found = logprobs.check_engine(
            batch,
            batch.column("old_logprobs"),
            counted,
            limit=self._engine_limit,
            noise=math.inf if self.noise is None else self.noise.limit(),
            routes=policy.weight_map.placement.num_experts > 0,
            ranks=[[i for plan in plans for i in samples_of([plan[r]])] for r in range(policy.grid.dp)],
            explain=explain,
        )
        if entropy is not None and self._config.rollout.temperature and not self._selects:
            self._entropy.check(batch, entropy, counted, slack=self._engine_limit / logprobs.ENTROPY_SLACK)
        return found

    def _objective(self, name: str, model: TrainingEngine, batch: Batch, loss: Loss) -> None:
        """Check a shipped algorithm's advantages and, once after each start, loss, head and precision."""
        config = self._config
        if name == "policy" and config.algorithm in shipped():
            check_advantages(batch, config)
            if self._greedy is not None and "baselines" in batch.extra:
                check_baselines(batch, self._greedy, config)
            if "dynamic_sampling" in algorithm_of(config).needs:
                batches.check_informative(batch, self.everything, config.data.prompts_per_step)
        if name == "policy":
            self.everything = self._greedy = None  # the next generation needs the memory
        if name not in self._checked:
            self._checked.add(name)
            check_precision(name, model)
            if name != "critic":
                check_head(model)
            if loss.check is not None:
                loss.check()
            else:
                check_loss(config.algorithm if name == "policy" else name, loss, config)
