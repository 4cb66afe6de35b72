"""The phases an algorithm is written in: draw, generate, score, log-probs, values, update.

Every rank runs every phase with the same arguments; what a phase returns is alike on every rank. Below this interface are
collectives, layouts, packing, the engines taking turns with the memory, timing and the metrics of each phase.
Metric names are verl's.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl.config.schema import Config, Optimizer, needs_reference
from rl.data.batch import Batch, fingerprint, pair_up
from rl.data.preferences import Preference
from rl.data.prompts import Prompt
from rl.data.sampler import EpochWalk, MixedSampler
from rl.engines.engines import Engines
from rl.engines.memory import Turns
from rl.faults.agreement import Agreement, check_replicas
from rl.faults.process import GIB, resident_bytes, return_free_memory
from rl.faults.watchdog import Watch
from rl.objectives import rollout_correction
from rl.objectives.aggregate import aggregate
from rl.objectives.kl import kl
from rl.objectives.kl_controller import AdaptiveKL, FixedKL
from rl.objectives.returns import place_at_end
from rl.objectives.segments import segment_sum
from rl.objectives.value_loss import explained_variance, value_loss
from rl.phases.batch_metrics import engine_gap, length_metrics, score_metrics, spread, token_mean
from rl.phases.scoring import Scorer
from rl.rewards.length import overlong_penalties
from rl.rollout.engine import Sampling, seed_of
from rl.rollout.exchange import exchange
from rl.rollout.sampling import greedy_sampling, train_sampling
from rl.run_directory.progress import Progress
from rl.runtime.collectives import any_rank
from rl.runtime.device import Device
from rl.runtime.session import control_group
from rl.stopping.requests import StepAborted, StopRequests
from rl.training.engine import TrainingEngine
from rl.training.loss import Loss, Totals
from rl.training.packing import MicroBatch, MicroBatches, plan_minibatch
from rl.training.schedule import learning_rate

SAMPLES_FILE = "samples.jsonl"


class Phases:
    """One run's engines and data, and the step being taken."""

    def __init__(
        self,
        config: Config,
        *,
        device: Device,
        engines: Engines,
        tokenizer,
        prompts: list[Prompt] | list[Preference],
        sampler: EpochWalk | MixedSampler,
        scorer: Scorer | None,
        progress: Progress,
        watch: Watch,
        agreement: Agreement,
        stop: StopRequests | None = None,
    ):
        self.config, self.device, self.engines = config, device, engines
        self.watch, self.agreement, self.turns = watch, agreement, Turns(config, device, engines)
        self.tokenizer, self.prompts, self.sampler, self.scorer, self.progress = (
            tokenizer,
            prompts,
            sampler,
            scorer,
            progress,
        )
        self.stop = stop if config.run.on_stop_in_generation == "redo" else None
        """What may end the generation of a training step."""
        self.sampling = train_sampling(config)
        penalty = config.objective.reward_kl
        self.kl_controller = (
            AdaptiveKL(penalty.coef, penalty.target, penalty.horizon)
            if penalty.controller == "adaptive" and penalty.coef
            else FixedKL(penalty.coef)
        )
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.num_tokens = 0
        """Prompt and response tokens of this step's updates."""
        self._updates = 0
        """Of the policy."""
        self._samples_written_at = -1
        self._first_step: int | None = None
        """Of this start."""
        self._learned = False
        """Whether some model was updated in this step, which then cannot be taken again."""

    # The step ---------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Forget the metrics of the last step."""
        self.step, self.metrics, self.num_tokens = step, {"training/global_step": step}, 0
        if self._first_step is None and step > 0:
            self._first_step = step
        return_free_memory()
        self.watch.where.begin_step(step)
        self.agreement.begin_step()
        self._learned = False

    @contextmanager
    def phase(self, name: str, *, timing: str, batch: int = 0) -> Iterator[None]:
        """A phase of rl.faults.phase_tracker.PHASES: the watchdog knows of it, ranks compare what they are about to do and with which
        batch (its fingerprint), and the seconds within it are added to timing_s/<timing>. Collective over the world."""
        with self.watch.where.phase(name, self.step) as place:
            with self.timed("agreement"):
                peak = torch.cuda.max_memory_allocated(self.device.torch) if self.device.is_cuda else 0
                host, peak = self.agreement.check(place, batch, (resident_bytes(), peak))
            self.metrics["perf/host_memory_gib"] = max(
                host / GIB, self.metrics.get("perf/host_memory_gib", 0.0)
            )
            if self.device.is_cuda:
                self.metrics["perf/device_memory_peak_gib"] = peak / GIB
            with self.timed(timing):
                yield

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds within it to timing_s/<name>."""
        start = time.perf_counter()
        yield
        key = f"timing_s/{name}"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start

    def draw_prompts(self, number: int = 0) -> list:
        """The next prompts in the order of the epoch, data.prompts_per_step unless another number is given."""
        return [self.prompts[i] for i in self.sampler.draw(number or self.config.data.prompts_per_step)]

    def draw_pairs(self) -> Batch:
        """The next data.prompts_per_step pairs of a chosen and a rejected response, in turn."""
        pairs: list[Preference] = self.draw_prompts()
        prompts = [pair.prompt_ids for pair in pairs]
        chosen, rejected = (
            _given(prompts, [getattr(pair, side) for pair in pairs])
            for side in ("chosen_ids", "rejected_ids")
        )
        batch = pair_up(chosen=chosen, rejected=rejected)
        self.metrics |= length_metrics(batch)
        return batch

    def targets(self, prompts: list[Prompt]) -> Batch:
        """The data's own responses in the place of generated ones."""
        batch = _given([p.token_ids for p in prompts], [p.response_ids for p in prompts])
        self.metrics |= length_metrics(batch)
        return batch

    # Generation -------------------------------------------------------------------------------------------------------

    def generate(self, prompts: list[Prompt], *, round: int = 0) -> Batch:
        """Sample rollout.samples_per_prompt responses to each prompt with the current weights. `round` tells apart the seeds
        of several calls in a step."""
        purpose = f"train.{self.step}.{round}" if round else f"train.{self.step}"
        batch = self.sample(prompts, self.sampling, purpose=purpose, timing="gen")
        self.metrics |= length_metrics(batch)
        return batch

    def sample(self, prompts: list[Prompt], sampling: Sampling, *, purpose: str, timing: str) -> Batch:
        """Responses by any sampling; `purpose` tells the seeds of this call from those of others. Logs no metrics but
        its seconds, as timing_s/<timing>. Raises StepAborted, on every rank, if a stop came into the generation of a step
        (timing `gen`) that has not updated anything yet."""
        self._wake_engine()
        engine = self.engines.rollout
        # By place in the draw: a prompt may be drawn twice in a step, and its samples must differ then.
        seeds = [seed_of(self.config.run.seed, purpose, place) for place in range(len(prompts))]
        total = len(prompts) * sampling.samples_per_prompt
        ids = [p.token_ids for p in prompts]
        interrupt = (
            self.stop.within_generation
            if self.stop is not None and timing == "gen" and not self._learned
            else None
        )
        with self.phase("generate", timing=timing, batch=fingerprint(ids)), self._bar(timing, total) as bar:
            mine = engine.generate(ids, sampling, seeds, progress=bar, interrupt=interrupt)
            if interrupt is not None and any_rank(mine is None):
                raise StepAborted
            if engine.rank_in_replica > 0:
                mine = []  # every rank of a replica has the same samples
            return exchange(ids, mine, sampling.samples_per_prompt, self.device)

    # Rewards ----------------------------------------------------------------------------------------------------------

    def score(self, batch: Batch, prompts: list[Prompt]) -> None:
        """Fill scores, rewards and score_details, and log them. Rewards are scores less the overlong punishment."""
        self.judge(batch, prompts, timing="reward")
        if self.config.reward.overlong_buffer_tokens:
            penalties = self._overlong_penalties(batch)
            batch.rewards = batch.rewards + penalties
            self.metrics["reward/overlong_penalty/mean"] = float(penalties.mean())
        self.log_generated(batch)
        if dist.get_rank() == 0 and self.config.logging.samples and self._samples_written_at != self.step:
            self._samples_written_at = self.step
            self._write_samples(batch, prompts)

    def log_generated(self, batch: Batch) -> None:
        """Log lengths and scores of the samples of this step; of several calls the last one counts."""
        self.metrics |= length_metrics(batch) | score_metrics(batch)

    def judge(
        self, batch: Batch, prompts: list[Prompt], *, timing: str, predictions: bool = False
    ) -> list[str | None] | None:
        """Fill scores, rewards and score_details by what the config says a response is worth. With `predictions` also the
        answer that the reward function found in each response, where it says so."""
        assert self.scorer is not None, "this run has no reward"
        if self.engines.reward_model is not None or self.engines.judge is not None:
            self.turns.to_training()
        with self.phase("score", timing=timing, batch=batch.fingerprint):
            columns, answers = self.scorer.score(batch, prompts, predictions=predictions)
        batch.scores = columns.pop("score")
        batch.rewards = batch.scores.clone()
        batch.score_details = columns
        return answers

    def greedy_rewards(self, prompts: list[Prompt]) -> Tensor:
        """Reward of the greedy response to each prompt, float32 [prompts]."""
        batch = self.sample(prompts, greedy_sampling(self.config), purpose="greedy", timing="gen")
        self.judge(batch, prompts, timing="reward")
        if self.config.reward.overlong_buffer_tokens:
            batch.rewards = batch.rewards + self._overlong_penalties(batch)
        self.metrics["critic/baseline/mean"] = float(batch.rewards.mean())
        return batch.rewards

    def _overlong_penalties(self, batch: Batch) -> Tensor:
        """What each sample loses by its length, float32 [N]."""
        penalties = overlong_penalties(
            batch.lengths.numpy(),
            max_tokens=self.config.rollout.max_response_tokens,
            buffer_tokens=self.config.reward.overlong_buffer_tokens,
            penalty=self.config.reward.overlong_penalty,
        )
        return torch.from_numpy(penalties).float()

    def reward_tokens(self, batch: Batch) -> None:
        """Fill token_rewards: a sample's reward at its last token, less the weighted divergence from the reference policy at
        each token (objective.reward_kl); rewards become their sums. Moves the weight, if it adapts."""
        batch.token_rewards = place_at_end(batch.rewards, batch.lengths, batch.mask)
        penalty = self.config.objective.reward_kl
        if penalty.coef:
            divergence = kl(batch.old_logprobs, batch.ref_logprobs, batch.mask, estimator=penalty.estimator)
            num_samples = int(_counted(batch).sum())
            per_sample = float(divergence.double().sum()) / max(num_samples, 1)
            self.metrics["actor/reward_kl_penalty"] = per_sample
            self.metrics["actor/reward_kl_penalty_coeff"] = self.kl_controller.coef
            batch.token_rewards = batch.token_rewards - self.kl_controller.coef * divergence
            batch.rewards = batch.rewards - self.kl_controller.coef * segment_sum(divergence, batch.lengths)
            if self.step > self.config.critic.warmup_steps:  # before, the policy cannot move
                self.kl_controller.update(per_sample, num_samples)
        self.metrics |= spread("critic/rewards", batch.rewards)

    def _write_samples(self, batch: Batch, prompts: list[Prompt]) -> None:
        """The first logging.samples samples of the step, for people to read."""
        with open(Path(self.config.run.dir, SAMPLES_FILE), "a", encoding="utf-8") as file:
            for i in range(min(self.config.logging.samples, len(batch))):
                prompt = prompts[int(batch.groups[i])]
                sample = {
                    "training/global_step": self.step,
                    "prompt": prompt.text,
                    "response": self.tokenizer.decode(batch.response_ids[i]),
                    "ground_truth": prompt.ground_truth,
                    "score": float(batch.scores[i]),
                }
                file.write(json.dumps(sample, ensure_ascii=False) + "\n")

    # Log-probs and values ---------------------------------------------------------------------------------------------

    def log_probs(self, batch: Batch) -> None:
        """Fill old_logprobs, under the weights that this step starts from; ref_logprobs if the config has a reference policy;
        and what corrects for the engine's probabilities being others (rollout_correction)."""
        self.turns.to_training()
        fix, goal = self.config.rollout_correction, self.config.objective
        if fix.bypass:
            batch.old_logprobs = batch.rollout_logprobs.clone()
        else:
            names = (
                "logprobs",
                "entropy",
                *(("sum_p_squared",) if goal.advantage == "optimal-token-baseline" else ()),
            )
            with (
                self.phase("log_probs", timing="old_log_prob", batch=batch.fingerprint),
                self._bar("logp", len(batch)) as bar,
            ):
                batch.old_logprobs, entropy, *squares = self.engines.policy.forward(
                    batch, self._plans(batch), names, bar
                )
            batch.sum_p_squared = squares[0] if squares else None
            self.metrics["actor/entropy"] = token_mean(entropy, batch.mask)
            self.metrics |= engine_gap(batch, batch.old_logprobs)
            self._correct_rollout(batch)
        if needs_reference(self.config):
            self.reference(batch)

    def reference(self, batch: Batch) -> None:
        """Fill ref_logprobs: log-probs under the policy that the run started from."""
        self.turns.to_training()
        policy = self.engines.policy
        with (
            self.phase("log_probs", timing="ref", batch=batch.fingerprint),
            self._bar("ref", len(batch)) as bar,
            policy.reference_weights(),
        ):
            (batch.ref_logprobs,) = policy.forward(batch, self._plans(batch), ("logprobs",), bar)

    def _correct_rollout(self, batch: Batch) -> None:
        """Weights and rejections for the gap between the engine's log-probs and the trainer's at the same weights."""
        fix = self.config.rollout_correction
        if batch.rollout_logprobs is None:
            return
        pair, mask, lengths = (batch.old_logprobs, batch.rollout_logprobs), batch.mask, batch.lengths
        self.metrics |= rollout_correction.metrics(*pair, lengths, mask)
        if fix.truncate_tokens:
            batch.loss_weights = rollout_correction.token_weights(*pair, mask, upper=fix.truncate_tokens)
        elif fix.truncate_samples:
            batch.loss_weights = rollout_correction.sequence_weights(
                *pair, lengths, mask, upper=fix.truncate_samples
            )
        elif fix.icepop_high:
            batch.loss_weights = rollout_correction.icepop(
                *pair, mask, low=fix.icepop_low, high=fix.icepop_high
            )
        if batch.loss_weights is not None:
            self.metrics["rollout_corr/weight_mean"] = token_mean(batch.loss_weights, mask)
        if fix.reject != "none":
            level, _, statistic = fix.reject.partition("-")
            kept = rollout_correction.reject(
                *pair,
                lengths,
                mask,
                level="token" if level == "token" else "sequence",
                statistic=statistic,
                low=fix.reject_low,
                high=fix.reject_high,
            )
            self.metrics["rollout_corr/rejected_fraction"] = 1.0 - float(kept.sum() / mask.sum().clamp(min=1))
            batch.mask = kept.float()

    def values(self, batch: Batch) -> None:
        """Fill old_values, the critic's before this step's updates."""
        self.turns.to_training()
        with (
            self.phase("log_probs", timing="values", batch=batch.fingerprint),
            self._bar("values", len(batch)) as bar,
        ):
            (batch.old_values,) = self.engines.critic.forward(batch, self._plans(batch), ("values",), bar)

    def implicit_rewards(self, batch: Batch) -> Tensor:
        """Reward of each token by the reward model that learns, float32 [T]: beta times its log-ratio to how it started."""
        self.turns.to_training()
        model, plans = self.engines.implicit_reward, self._plans(batch)
        with self.phase("log_probs", timing="implicit_reward", batch=batch.fingerprint):
            (now,) = model.forward(batch, plans, ("logprobs",))
            with model.reference_weights():
                (batch.implicit_ref_logprobs,) = model.forward(batch, plans, ("logprobs",))
        rewards = self.config.implicit_reward.beta * (now - batch.implicit_ref_logprobs)
        self.metrics["implicit_reward/reward/mean"] = token_mean(rewards, batch.mask)
        return rewards

    # Updates ----------------------------------------------------------------------------------------------------------

    def update(
        self, batch: Batch, loss: Loss, *, choose: Callable[[Batch, Tensor, int], Tensor] | None = None
    ) -> None:
        """training.epochs passes over the mini-batches, an optimizer step of the policy each.

        `choose` picks tokens from a whole mini-batch before its update, by the log-probs under the present weights; the loss
        finds them as the column `chosen`.
        """
        if batch.advantages is not None:
            self.metrics |= spread("critic/advantages", batch.advantages[batch.mask > 0])
        policy = self.engines.policy
        first = self._updates

        def before_minibatch(plan):
            if choose is not None:
                moved = self._updates > first or self.config.rollout_correction.bypass
                self._choose(batch, plan, choose, moved=moved, number=self._updates - first)

        def after_minibatch():
            self._updates += 1

        means = self._learn(
            policy,
            batch,
            loss,
            self.config.training.optimizer,
            timing="update_actor",
            before=before_minibatch,
            after=after_minibatch,
            waited=self.config.critic.warmup_steps,
        )
        self.num_tokens += int(batch.prompt_lengths.sum() + batch.lengths.sum())
        self.metrics |= {name if "/" in name else f"actor/{name}": value for name, value in means.items()}

    def update_critic(self, batch: Batch) -> None:
        """The same passes with the value loss, an optimizer step of the critic each; reads returns and old_values."""
        clip = self.config.critic.value_clip

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

        means = self._learn(
            self.engines.critic, batch, loss, self.config.critic.optimizer, timing="update_critic"
        )
        self.metrics |= {f"critic/{name}": value for name, value in means.items()}
        counted = batch.mask > 0
        self.metrics |= spread("critic/values", batch.old_values[counted]) | spread(
            "critic/returns", batch.returns[counted]
        )
        self.metrics["critic/vf_explained_var"] = explained_variance(
            batch.old_values, batch.returns, batch.mask
        )

    def update_implicit_reward(self, batch: Batch, loss: Loss) -> None:
        """The same passes with a loss of the reward model that learns; reads labels and implicit_ref_logprobs."""
        means = self._learn(
            self.engines.implicit_reward,
            batch,
            loss,
            self.config.implicit_reward.optimizer,
            timing="update_implicit_reward",
        )
        self.metrics |= {
            name if "/" in name else f"implicit_reward/{name}": value for name, value in means.items()
        }

    def _learn(
        self,
        model: TrainingEngine,
        batch: Batch,
        loss: Loss,
        optimizer: Optimizer,
        *,
        timing: str,
        before=None,
        after=None,
        waited: int = 0,
    ) -> dict[str, float]:
        """Updates of one model, whose learning rate starts after `waited` steps; returns the means over them of what the loss
        reports."""
        self.turns.to_training()
        self._learned = True
        lr = learning_rate(optimizer, self.step - waited, self.config.run.max_steps - waited)
        plans, sums, updates = self._plans(batch), {}, 0
        every = self.config.agreement.weights_every
        if every and (self.step % every == 0 or self.step == self._first_step):
            # Before the updates: these write every weight anew, on all replicas, from the one that owns its part.
            name = next(name for name, learning in self.engines.learning.items() if learning is model)
            with self.timed("agreement"):
                check_replicas(name, model.replicas(), control_group())
        with (
            self.phase("update", timing=timing, batch=batch.fingerprint),
            self._bar("train", len(batch) * self.config.training.epochs) as bar,
        ):
            for _ in range(self.config.training.epochs):
                for plan in plans:
                    if before is not None:
                        before(plan)
                    totals = _totals(batch, plan)
                    terms = model.update(
                        batch, plan, lambda m, totals=totals: loss(m, totals), lr=lr, progress=bar
                    )
                    updates += 1
                    if after is not None:
                        after()
                    for name, value in terms.items():
                        sums[name] = sums.get(name, 0.0) + value
        return {name: value / updates for name, value in sums.items()} | {"lr": lr}

    def _choose(self, batch: Batch, plan: list[MicroBatches], choose, *, moved: bool, number: int) -> None:
        """Fill `chosen` for the samples of a mini-batch, before update `number` of this step."""
        samples = _samples(plan)
        logprobs = batch.old_logprobs
        if moved:  # else the old log-probs are the present ones
            (logprobs,) = self.engines.policy.forward(batch, [plan], ("logprobs",))
        offsets = batch.offsets
        index = torch.cat([torch.arange(int(offsets[i]), int(offsets[i + 1])) for i in samples])
        batch.chosen = torch.zeros(len(batch.mask))
        seed = seed_of(self.config.run.seed, "choose", self.step, number)
        batch.chosen[index] = choose(batch.select(samples), logprobs[index], seed).float()

    # Turns of the engines ---------------------------------------------------------------------------------------------

    def _wake_engine(self) -> None:
        self.metrics |= self.turns.to_engine(
            self._updates, self.step, lambda: self.phase("refit", timing="update_weights")
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around whatever reads the training models from outside of a phase, such as a checkpoint."""
        self.turns.to_training()
        with self.phase("save", timing="save_checkpoint"):
            yield

    # Micro-batches ----------------------------------------------------------------------------------------------------

    def _plans(self, batch: Batch) -> list[list[MicroBatches]]:
        """The micro-batches of each mini-batch; made once for a batch, so that every pass packs alike."""
        if batch.plans is None:
            per_minibatch = self.config.training.prompts_per_minibatch or self.config.data.prompts_per_step
            num_groups = int(batch.groups.max()) + 1
            # Evenly: a step that is short of groups must not end with an update from one of them.
            num_minibatches = -(-num_groups // per_minibatch)
            minibatch_of = torch.div(batch.groups * num_minibatches, num_groups, rounding_mode="floor")
            dp, max_tokens = self.engines.policy.grid.dp, self.config.training.micro_batch_tokens
            batch.plans = [
                plan_minibatch(
                    batch, (minibatch_of == k).nonzero().squeeze(1).tolist(), dp=dp, max_tokens=max_tokens
                )
                for k in range(num_minibatches)
            ]
        return batch.plans

    def _bar(self, name: str, total: int):
        return self.progress.phase(f"step {self.step} {name}", total, "samples")


def _given(prompt_ids: list, response_ids: list) -> Batch:
    """A batch of responses that nobody sampled; each is a group of its own."""
    return Batch(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        groups=torch.arange(len(prompt_ids)),
        truncated=torch.zeros(len(prompt_ids), dtype=torch.bool),
    )


def _samples(plan: list[MicroBatches]) -> list[int]:
    """The samples of a mini-batch, in order."""
    return sorted(i for rank in plan for micro in rank for i in micro)


def _totals(batch: Batch, plan: list[MicroBatches]) -> Totals:
    samples = _samples(plan)
    tokens = segment_sum(batch.mask, batch.lengths)[samples].sum()
    counted = _counted(batch)[samples].sum()
    return Totals(
        num_tokens=max(float(tokens), 1.0),
        num_samples=max(float(counted), 1.0),
        num_units=max(len(samples) / batch.samples_per_unit, 1.0),
    )


def _counted(batch: Batch) -> Tensor:
    """Whether a sample has a token that counts, bool [N]."""
    return segment_sum(batch.mask, batch.lengths) > 0
