"""The interface that an algorithm's file calls: draw, generate, score, log-probs, update.

Every rank calls every method with the same arguments, and results are identical on every rank. Collectives,
layouts, packing, memory sharing, timing and the metrics of each phase are below this interface. Metric names
are verl's.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from rl.checks.advantages import check_kl_coef
from rl.checks.batches import check_mismatched, check_sides
from rl.checks.checks import Checks
from rl.config.declarations import shipped
from rl.config.needs import algorithm_of
from rl.config.schema import Config
from rl.data.batch import Batch, data_responses, given_responses, mismatch, pair_up
from rl.data.preferences import Labelled, PreferencePair
from rl.data.prompts import Prompt
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.models.sizes import cpu_row_tokens
from rl.phases.batch_metrics import length_metrics, score_metrics
from rl.phases.draw import Draw
from rl.phases.inference import Inference
from rl.phases.minibatches import MinibatchPlanner
from rl.phases.old_logprobs import OldLogprobs
from rl.phases.reward_shaping import KlPenalty
from rl.phases.sampler import SampleCall, Sampler
from rl.phases.scorer import Scorer
from rl.phases.scoring import Scoring
from rl.phases.step_record import StepRecord
from rl.phases.teachers import Teachers
from rl.phases.updates import Updates
from rl.rollout.sampling import greedy_sampling
from rl.training.loss import Loss, LossFunction, TokenSelection
from rl.training.micro_batch_plans import Cost


class Phases:
    """The phases of one run.

    `config` is the run's configuration, `step` the current step, and `metrics` the metrics that the step
    logs.

    make_teachers: returns the teachers from (config, step, engines, memory, planner); None: no teachers.
    """

    def __init__(
        self,
        config: Config,
        *,
        step: StepRecord,
        engines: Engines,
        memory: MemorySharing,
        draw: Draw,
        sampler: Sampler,
        scorer: Scorer | None,
        end_ids: frozenset[int] = frozenset(),
        make_teachers: Callable[..., Teachers] | None = None,
    ):
        self.config, self.step, self.engines, self.memory = config, step, engines, memory
        self.draw, self.sampler = draw, sampler
        policy = engines.policy
        cost = Cost.of_model(policy.weight_map.hf, policy.weight_map.weights)
        row = 0 if policy.device.is_cuda else config.training.cp * cpu_row_tokens(policy.weight_map.hf)
        shares = policy.shares_prompts
        planner = MinibatchPlanner(config, policy.grid.dp, cost, shares_prompts=shares, preferred_tokens=row)
        self.row_tokens = planner.row_tokens
        self.checks = Checks(config, policy, end_ids)
        shared = (config, step, engines, self.memory, planner)
        old_logprobs = OldLogprobs(config, step, policy, planner, self.checks)
        self.inference = Inference(*shared, self.checks, old_logprobs)
        self.updates = Updates(*shared, self.inference, self.checks, old_logprobs)
        self.teaching = None if make_teachers is None else make_teachers(*shared)
        """Passes of the teachers; None if the run has none."""
        self.scoring = Scoring(config, step, engines, self.memory, scorer)
        self.kl_penalty = KlPenalty(config)
        self.end_ids = end_ids
        """Ids of tokens that end a response, besides `rollout.stop_token_ids`."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the current step, by name."""
        return self.step.metrics

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds in the body to timing_s/<name>."""
        return self.step.timed(name)

    # Collect: the data of a step --------------------------------------------------------------------------

    def draw_prompts(self, number: int = 0) -> list:
        """Return the next prompts in the epoch's order.

        Returns as many prompts as `generate` needs to return `number` groups; 0 means data.prompts_per_step.
        """
        number = number or self.config.data.prompts_per_step
        return self.draw.next(self.sampler.num_to_draw(number))

    def draw_others(self, number: int) -> list:
        """Return the next `number` prompts; the data or a teacher gives the responses, not the policy."""
        return self.draw.next(number)

    def draw_pairs(self) -> Batch:
        """Return the next data.prompts_per_step pairs; each is a chosen and a rejected response."""
        pairs: list[PreferencePair] = self.draw_prompts()
        ids = [pair.prompt_ids for pair in pairs]
        chosen = given_responses(ids, [p.chosen_ids for p in pairs], [p.chosen_mask for p in pairs])
        rejected = given_responses(ids, [p.rejected_ids for p in pairs], [p.rejected_mask for p in pairs])
        return self._with_lengths_logged(pair_up(chosen=chosen, rejected=rejected))

    def draw_labelled(self) -> Batch:
        """Return the next data.prompts_per_step responses of the data.

        The column `labels` is 1 for a desirable response and 0 for an undesirable one.
        """
        rows: list[Labelled] = self.draw_prompts()
        ids, masks = [row.prompt_ids for row in rows], [row.response_mask for row in rows]
        batch = given_responses(ids, [row.response_ids for row in rows], masks)
        batch.extra["labels"] = torch.tensor([float(row.label) for row in rows])
        return self._with_lengths_logged(batch)

    def mismatched(self, batch: Batch) -> Batch:
        """Return a batch in which each prompt has the response to another prompt, as KTO needs it."""
        parts = [plan.samples for plan in self.updates.plans(batch)]
        others = mismatch(batch, parts)
        check_mismatched(batch, others, parts)
        return others

    def targets(self, prompts: list[Prompt]) -> Batch:
        """Return the data's own responses in place of generated ones."""
        return self._with_lengths_logged(data_responses(prompts))

    def generate(self, prompts: list[Prompt], *, round: int = 0) -> Batch:
        """Sample rollout.samples_per_prompt responses per prompt with the current weights.

        The batch may have groups of other prompts (`Batch.prompts`): for example, with rollout.carry_over it
        has groups that an earlier step began. round: number of the call within the step; calls with different
        numbers sample with different seeds.
        """
        batch = self.sampler.batch(prompts, round=round)
        self.checks.generated(batch, limits_vary=self.sampler.varies_limits)
        return self._with_lengths_logged(batch)

    def score_samples(self, batch: Batch) -> None:
        """Fill `scores`, `rewards` and `score_details`. Rewards are scores minus the overlong penalty."""
        self.scoring.score_samples(batch)

    def teacher_responses(self, prompts: list[Prompt]) -> Batch:
        """Sample rollout.samples_per_prompt responses per prompt from the teacher."""
        assert self.teaching is not None, "the algorithm must declare teacher in NEEDS"
        return self._with_lengths_logged(self.teaching.responses(prompts))

    def greedy_rewards(self, prompts: list[Prompt]) -> Tensor:
        """Return the reward of the greedy response to each prompt, float32 [prompts]."""
        batch = self.sampler.sample(SampleCall(prompts, greedy_sampling(self.config), "greedy"))
        self.checks.greedy(batch, prompts)
        return self.scoring.greedy_rewards(batch)

    def log_generated(self, batch: Batch) -> None:
        """Log lengths and scores of the step's samples. If called repeatedly, the last call wins."""
        self.step.metrics |= score_metrics(self._with_lengths_logged(batch).merge_rows())
        self.checks.everything = batch

    # Learn: log-probs, advantages, updates ----------------------------------------------------------------

    def log_probs(self, batch: Batch) -> None:
        """Fill the log-prob columns of the batch and apply `rollout_correction`.

        Fills `old_logprobs`. Also fills `ref_logprobs` if the run has a reference policy, and
        `teacher_logprobs` if `teacher.advantage_coef` is set. With one update per step, `old_logprobs` may
        remain None until `update`. An algorithm that reads `old_logprobs` earlier must declare "old_logprobs"
        in NEEDS.
        """
        self.inference.log_probs(batch)
        if self.teaching is not None:
            self.teaching.log_probs(batch)

    def distributions(self, batch: Batch) -> None:
        """Compute the teachers' distributions, so that a loss can read the divergence from them.

        Such a loss declares the output `divergence` in its `reads`.
        """
        assert self.teaching is not None, "the algorithm must declare teacher in NEEDS"
        self.teaching.distributions(batch)

    def reference(self, batch: Batch) -> None:
        """Fill `ref_logprobs`: log-probs under the policy that the run started from."""
        self.inference.reference(batch)

    def values(self, batch: Batch) -> None:
        """Fill `old_values`: the critic's values before this step's updates."""
        self.inference.values(batch)

    def implicit_rewards(self, batch: Batch) -> Tensor:
        """Return the implicit reward of each token, float32 [T]; fill `implicit_ref_logprobs`."""
        return self.inference.implicit_rewards(batch)

    def apply_kl_penalty(self, batch: Batch) -> None:
        """Fill `token_rewards`, and reduce the rewards by the KL penalty.

        The penalty is the KL divergence times the coefficient of `objective.reward_kl`.
        """
        before = self.kl_penalty.controller.coef
        self.step.metrics |= self.kl_penalty.apply(batch, self.step.number)
        moves = self.step.number > self.config.critic.warmup_steps
        check_kl_coef(batch, self.config, before, self.kl_penalty.controller.coef, moves=moves)

    def update(
        self,
        batch: Batch,
        loss: Loss | LossFunction,
        *,
        select_tokens: TokenSelection | None = None,
        mismatched: Batch | None = None,
    ) -> None:
        """Update the policy: one optimizer step per mini-batch of the batch, and `training.epochs` passes.

        loss: a function (micro-batch, totals) -> (loss, metrics), both divided by the totals, or a `Loss`.
        select_tokens: called before each update with the whole mini-batch; the loss reads the result as the
        column `selected_tokens`.
        mismatched: the result of `Phases.mismatched`, with `ref_logprobs` filled, for a loss with the
        argument `kl`.
        """
        if self.teaching is not None:
            self.teaching.add_to_advantages(batch)
        if self.config.algorithm in shipped() and "samples" not in algorithm_of(self.config).needs:
            check_sides(batch, self.draw.last)
        self.updates.policy(batch, loss, select_tokens=select_tokens, mismatched=mismatched)

    def update_critic(self, batch: Batch) -> None:
        """Update the critic; reads `returns` and `old_values`."""
        self.updates.critic(batch)

    def update_implicit_reward(self, batch: Batch, loss: Loss | LossFunction) -> None:
        """Update the implicit reward model; reads `labels` and `implicit_ref_logprobs`."""
        self.updates.implicit_reward(batch, loss)

    # Between steps ----------------------------------------------------------------------------------------

    def cursor(self) -> dict[str, Any]:
        """Return the state of the draw of prompts. Later phases do not modify the returned object."""
        return self.draw.state_dict() | self.sampler.cursor()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Run the body as the phase `save`, with the training models' weights on the device."""
        self.memory.to_training()
        with self.step.phase("save", timing="save_checkpoint"):
            yield

    def _with_lengths_logged(self, batch: Batch) -> Batch:
        self.step.metrics |= length_metrics(batch, max_prompt_tokens=self.config.data.max_prompt_tokens)
        return batch
