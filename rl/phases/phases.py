"""The interface that an algorithm is written in: draw, generate, score, log-probs, update.

Every rank calls every method with the same arguments, and results are identical on every rank. Collectives,
layouts, packing, memory sharing, timing and the metrics of each phase are below this interface. Metric names
are verl's.
"""

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl.checks.batches import CheckFailed
from rl.checks.checks import Checks
from rl.config.schema import Config, uses_teacher
from rl.data.batch import Batch, data_responses, given_responses, mismatch, pair_up
from rl.data.preferences import Labelled, Preference
from rl.data.prompts import Prompt
from rl.data.sampler import EpochSampler, MixedSampler
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.phases.batch_metrics import length_metrics, score_metrics
from rl.phases.generation import Generation
from rl.phases.inference import Inference
from rl.phases.minibatches import MinibatchPlanner
from rl.phases.reward_shaping import KlPenalty
from rl.phases.scorer import Scorer
from rl.phases.scoring import Scoring
from rl.phases.step import Step
from rl.phases.updates import Updates
from rl.rollout.queue import PastLengths
from rl.rollout.sampling import greedy_sampling, train_sampling
from rl.stopping.requests import StopRequests
from rl.training.loss import Loss, LossFunction, TokenSelection
from rl.training.micro_batch_plans import Cost

if TYPE_CHECKING:  # only for runs with roles, with a teacher, and for points of a sweep
    from transformers import PreTrainedTokenizerBase

    from rl.phases.joint_generation import PointGeneration
    from rl.refit.link import Link


class Phases:
    """The phases of one run.

    `config` is the run's configuration, `step` the current step, and `metrics` the metrics that the step
    logs.

    link: the link to the ranks that generate, if these do not (`roles`). generation: that of a point of a
    sweep, which shares the engine with others.
    tokenizer: the policy's, for prompts of teachers.
    """

    def __init__(
        self,
        config: Config,
        *,
        step: Step,
        engines: Engines,
        prompts: list[Prompt] | list[Preference] | list[Labelled],
        sampler: EpochSampler | MixedSampler,
        scorer: Scorer | None,
        end_ids: frozenset[int] = frozenset(),
        stop: StopRequests | None = None,
        agents=None,
        link: "Link | None" = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        generation: "PointGeneration | None" = None,
    ):
        self.config, self.step, self.engines = config, step, engines
        self.prompts, self.sampler = prompts, sampler
        self.memory = MemorySharing(config, step.device, engines)
        stop = stop if config.run.on_stop_in_generation == "redo" else None
        policy = engines.policy
        cost = Cost.of_model(policy.weight_map.hf, policy.weight_map.weights)
        planner = MinibatchPlanner(config, policy.grid.dp, cost, shares_prompts=policy.shares_prompts)
        self.generation = generation or Generation(config, step, engines, self.memory, stop, agents)
        self.split = None
        """`generation`, if other ranks generate (`roles`)."""
        if link is not None:
            from rl.phases.split import SplitGeneration

            stop = None if config.rollout.deterministic else stop
            self.generation = self.split = SplitGeneration(config, step, policy, self.memory, stop, link=link)
        self.checks = Checks(config, policy, end_ids)
        shared = (config, step, engines, self.memory, planner)
        self.inference = Inference(*shared, self.checks)
        self.updates = Updates(*shared, self.inference, self.checks)
        self.teaching = None
        """Passes of the teachers; None if the run has none."""
        if uses_teacher(config):
            from rl.phases.teaching import Teaching

            assert tokenizer is not None
            self.teaching = Teaching(config, step, engines, self.memory, planner, tokenizer)
        self.scoring = Scoring(config, step, engines, self.memory, scorer)
        self.kl_penalty = KlPenalty(config)
        self.end_ids = end_ids
        """Ids of tokens that end a response, besides those of `rollout.stop_token_ids`."""
        self.num_drawn = 0
        """Prompts that the steps of the run have drawn, those before a resume included."""
        self.past_lengths = PastLengths() if config.rollout.longest_first else None
        self.carry_over = None
        if config.rollout.carry_over:
            from rl.phases.carry_over import CarryOver

            self.carry_over = CarryOver(config, step, engines, self.generation)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the current step, by name."""
        return self.step.metrics

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds in the body to timing_s/<name>."""
        return self.step.timed(name)

    # Collect: the data of a step --------------------------------------------------------------------------

    def draw_prompts(self, number: int = 0) -> list:
        """Return the next prompts in the epoch's order: data.prompts_per_step, or the given number.

        With `rollout.carry_over`, they are those that `generate` needs to return so many groups.
        """
        number = number or self.config.data.prompts_per_step
        self._check_cursor()
        if self.carry_over is not None:
            number = self.carry_over.num_to_draw(number)
        drawn = [self.prompts[i] for i in self.sampler.draw(number)]
        self.num_drawn += number
        return drawn if self.carry_over is None else self.carry_over.number(drawn)

    def _check_cursor(self) -> None:
        """Raise CheckFailed if the sampler has passed another number of prompts than the steps have drawn."""
        passed = self.sampler.num_drawn
        if passed is not None and passed != self.num_drawn:
            raise CheckFailed(
                f"draw check: the data cursor is behind {passed} prompts, but the steps so far have drawn "
                f"{self.num_drawn}: prompts are {'skipped' if passed > self.num_drawn else 'repeated'}."
            )

    def draw_pairs(self) -> Batch:
        """Return the next data.prompts_per_step pairs, a chosen and a rejected response each."""
        pairs: list[Preference] = self.draw_prompts()
        ids = [pair.prompt_ids for pair in pairs]
        chosen, rejected = [p.chosen_ids for p in pairs], [p.rejected_ids for p in pairs]
        chosen = given_responses(ids, chosen, [pair.chosen_mask for pair in pairs])
        rejected = given_responses(ids, rejected, [pair.rejected_mask for pair in pairs])
        return self._with_lengths_logged(pair_up(chosen=chosen, rejected=rejected))

    def draw_labelled(self) -> Batch:
        """Return the next data.prompts_per_step responses of the data; `labels` are 1 for desirable ones."""
        rows: list[Labelled] = self.draw_prompts()
        ids, masks = [row.prompt_ids for row in rows], [row.response_mask for row in rows]
        batch = given_responses(ids, [row.response_ids for row in rows], masks)
        batch.labels = torch.tensor([float(row.label) for row in rows])
        return self._with_lengths_logged(batch)

    def mismatched(self, batch: Batch) -> Batch:
        """Return the prompts with the response of the previous sample of the same mini-batch."""
        return mismatch(batch, [plan.samples for plan in self.updates.plans(batch)])

    def targets(self, prompts: list[Prompt]) -> Batch:
        """Return the data's own responses in place of generated ones."""
        return self._with_lengths_logged(data_responses(prompts))

    def generate(self, prompts: list[Prompt], *, round: int = 0) -> Batch:
        """Sample rollout.samples_per_prompt responses per prompt with the current weights.

        With `rollout.carry_over`, the batch has the groups that were complete first, also of prompts of other
        steps (`Batch.prompts`).

        round: number of the call within the step; calls with different numbers sample with different seeds.
        """
        indices = [prompt.index for prompt in prompts]
        order = None if self.past_lengths is None else self.past_lengths.longest_first(indices)
        if self.carry_over is not None:
            batch = self.carry_over.generate([prompts[i] for i in order] if order else prompts)
        else:
            purpose = f"train.{self.step.number}.{round}" if round else f"train.{self.step.number}"
            if self.split is not None:
                batch = self.split.next_batch(prompts, purpose=purpose)
            else:
                batch = self.generation.sample(
                    prompts,
                    train_sampling(self.config),
                    purpose=purpose,
                    timing="gen",
                    abortable=True,
                    order=order,
                )
        self.checks.generated(batch)
        if self.past_lengths is not None:
            indices = [prompt.index for prompt in batch.prompts]
            self.past_lengths.note(indices, batch.groups.tolist(), batch.lengths.tolist())
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
        sampling = greedy_sampling(self.config)
        batch = self.generation.sample(prompts, sampling, purpose="greedy", timing="gen", abortable=True)
        return self.scoring.greedy_rewards(batch)

    def log_generated(self, batch: Batch) -> None:
        """Log lengths and scores of the step's samples. If called repeatedly, the last call wins."""
        self.step.metrics |= score_metrics(self._with_lengths_logged(batch).merge_rows())

    # Learn: log-probs, advantages, updates ----------------------------------------------------------------

    def log_probs(self, batch: Batch) -> None:
        """Fill `old_logprobs`, with a reference policy `ref_logprobs`, and with `teacher.advantage_coef`
        `teacher_logprobs`; apply `rollout_correction`.

        `old_logprobs` may remain None until the first `update`. An algorithm that reads them earlier must
        declare "old_logprobs" in NEEDS.
        """
        self.inference.log_probs(batch)
        if self.config.teacher.advantage_coef:
            assert self.teaching is not None
            self.teaching.log_probs(batch)

    def distributions(self, batch: Batch) -> None:
        """Fill `teacher`: the teachers' distributions, from which the output `divergence` is computed."""
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
        """Fill `token_rewards`; subtract `objective.reward_kl` times the KL divergence from the rewards."""
        self.step.metrics |= self.kl_penalty.apply(batch, self.step.number)

    def update(
        self,
        batch: Batch,
        loss: Loss | LossFunction,
        *,
        select_tokens: TokenSelection | None = None,
        mismatched: Batch | None = None,
    ) -> None:
        """Update the policy on the batch's mini-batches. See `Updates.policy`."""
        self.updates.policy(batch, loss, select_tokens=select_tokens, mismatched=mismatched)

    def update_critic(self, batch: Batch) -> None:
        """Update the critic; reads `returns` and `old_values`."""
        self.updates.critic(batch)

    def update_implicit_reward(self, batch: Batch, loss: Loss | LossFunction) -> None:
        """Update the implicit reward model; reads `labels` and `implicit_ref_logprobs`."""
        self.updates.implicit_reward(batch, loss)

    # Between steps ----------------------------------------------------------------------------------------

    def cursor(self) -> dict[str, Any]:
        """Return where the draw of prompts stands. Later phases do not change what it holds."""
        cursor: dict[str, Any] = {"sampler": self.sampler.state_dict(), "num_drawn": self.num_drawn}
        cursor["num_prompts"] = len(self.prompts)
        if self.carry_over is not None:
            cursor["carry_over"] = self.carry_over.frontier
        if self.past_lengths is not None:
            cursor["past_lengths"] = dict(self.past_lengths.means)
        return cursor

    @contextmanager
    def saving(self):
        """Run the body as the phase `save`, with the training models' weights in place."""
        self.memory.to_training()
        with self.step.phase("save", timing="save_checkpoint"):
            yield

    def _with_lengths_logged(self, batch: Batch) -> Batch:
        self.step.metrics |= length_metrics(batch, max_prompt_tokens=self.config.data.max_prompt_tokens)
        return batch
