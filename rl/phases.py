"""The phases an algorithm is written in: draw, generate, score, log-probs, update.

Every rank runs every phase with the same arguments; what a phase returns is alike on every rank. Below this interface are
collectives, layouts, packing, the two engines taking turns with the memory, timing and the metrics of each phase.
Metric names are verl's.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl.config import Config
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.data.sampler import PromptSampler
from rl.refit.gather import check_refit, refit
from rl.rewards.scoring import score_samples
from rl.rollout.engine import RolloutEngine, Sampling, seed_of
from rl.rollout.exchange import exchange
from rl.runtime.collectives import sum_over_world
from rl.runtime.device import Device
from rl.runtime.progress import Progress
from rl.training.engine import TrainingEngine
from rl.training.packing import MicroBatch, MicroBatches
from rl.training.schedule import learning_rate

SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True)
class Totals:
    """Denominators of a mini-batch, over all ranks and micro-batches."""

    num_tokens: float
    """Response tokens that count (mask 1)."""
    num_samples: float


Loss = Callable[[MicroBatch, Totals], tuple[Tensor, dict[str, Tensor]]]
"""(loss, metrics) of a micro-batch; both divided by the mini-batch's totals already, so that they add up to it."""


class Phases:
    """One run's engines and data, and the step being taken."""

    def __init__(
        self,
        config: Config,
        *,
        device: Device,
        trainer: TrainingEngine,
        engine: RolloutEngine | None,
        tokenizer,
        prompts: list[Prompt],
        reward: Callable | None,
        progress: Progress,
    ):
        self.config, self.device, self.trainer, self.engine = config, device, trainer, engine
        self.tokenizer, self.prompts, self.reward, self.progress = tokenizer, prompts, reward, progress
        self.sampler = PromptSampler(len(prompts), seed=config.run.seed, shuffle=config.data.shuffle)
        self.sampling = train_sampling(config)
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.num_tokens = 0
        """Prompt and response tokens of this step's updates."""
        self._num_refits = 0
        self._engine_has_weights_of = -1
        self._updates = 0
        self._engine_awake = True  # vLLM starts awake

    # The step ---------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Forget the metrics of the last step."""
        self.step, self.metrics, self.num_tokens = step, {"training/global_step": step}, 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds within it to timing_s/<name>."""
        start = time.perf_counter()
        yield
        key = f"timing_s/{name}"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start

    def draw_prompts(self) -> list[Prompt]:
        """The next data.prompts_per_step prompts in the shuffled order."""
        return [self.prompts[i] for i in self.sampler.draw(self.config.data.prompts_per_step)]

    # Generation -------------------------------------------------------------------------------------------------------

    def generate(self, prompts: list[Prompt]) -> Batch:
        """Sample rollout.samples_per_prompt responses to each prompt with the current weights."""
        batch = self.sample(prompts, self.sampling, purpose=f"train.{self.step}", timing="gen")
        self.metrics |= _length_metrics(batch)
        return batch

    def sample(self, prompts: list[Prompt], sampling: Sampling, *, purpose: str, timing: str) -> Batch:
        """Responses by any sampling; `purpose` tells the seeds of this call from those of others. Logs no metrics but
        its seconds, as timing_s/<timing>."""
        assert self.engine is not None, "this run has no generation engine"
        self._wake_engine()
        # By place in the draw: a prompt may be drawn twice in a step, and its samples must differ then.
        seeds = [seed_of(self.config.run.seed, purpose, place) for place in range(len(prompts))]
        total = len(prompts) * sampling.samples_per_prompt
        with self.timed(timing), self._bar(timing, total) as bar:
            mine = self.engine.generate([p.token_ids for p in prompts], sampling, seeds, progress=bar)
            if self.engine.rank_in_replica > 0:
                mine = []  # every rank of a replica has the same samples
            return exchange(prompts, mine, sampling.samples_per_prompt, self.device)

    def targets(self, prompts: list[Prompt]) -> Batch:
        """The data's own responses in the place of generated ones: the batch of supervised fine-tuning."""
        batch = Batch(
            prompt_ids=[p.token_ids for p in prompts],
            response_ids=[p.response_ids for p in prompts],
            groups=torch.arange(len(prompts)),
            truncated=torch.zeros(len(prompts), dtype=torch.bool),
        )
        self.metrics |= _length_metrics(batch)
        return batch

    # Rewards ----------------------------------------------------------------------------------------------------------

    def score(self, batch: Batch, prompts: list[Prompt]) -> None:
        """Fill scores, rewards and score_details, and log them."""
        self.judge(batch, prompts, timing="reward")
        self.metrics["reward/failures"] = float(batch.score_details["failed"].sum())
        self.metrics |= _spread("critic/score", batch.scores)
        for name, column in batch.score_details.items():
            if name != "failed":
                self.metrics[f"reward/{name}/mean"] = float(column.nanmean())
        if dist.get_rank() == 0 and self.config.logging.samples:
            self._write_samples(batch, prompts)

    def judge(self, batch: Batch, prompts: list[Prompt], *, timing: str) -> None:
        """Fill scores, rewards and score_details. Each rank calls the reward function on every world-size-th sample."""
        world, rank = dist.get_world_size(), dist.get_rank()
        mine = range(rank, len(batch), world)
        with self.timed(timing):
            texts = self.tokenizer.batch_decode([batch.response_ids[i] for i in mine], skip_special_tokens=True)
            samples = [_reward_sample(prompts[int(batch.groups[i])], text) for i, text in zip(mine, texts)]
            results = score_samples(
                self.reward, samples, kwargs=self.config.reward.kwargs, failure_score=self.config.reward.failure_score
            )
            columns = _columns_of(results, list(mine), len(batch), self.device)
        if "acc" in columns:  # a failed sample is a wrong one
            columns["acc"] = columns["acc"].masked_fill(columns["failed"] > 0, 0.0)
        batch.scores = columns.pop("score")
        batch.rewards = batch.scores.clone()
        batch.score_details = columns

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

    # Log-probs --------------------------------------------------------------------------------------------------------

    def old_logprobs(self, batch: Batch) -> Tensor:
        """Log-probs of the response tokens under the weights that this step starts from, float32 [T].

        Also logs how far the engine's probabilities are from the trainer's.
        """
        self._sleep_engine()
        with self.timed("old_log_prob"), self._bar("logp", len(batch)) as bar:
            logprobs, entropy = self.trainer.logprobs(batch, self._plans(batch), progress=bar)
        weight = batch.mask / batch.mask.sum().clamp(min=1)
        self.metrics["actor/entropy"] = float((entropy * weight).sum())
        if batch.rollout_logprobs is not None:
            gap = (logprobs.exp() - batch.rollout_logprobs.exp()).abs() * (batch.mask > 0)
            self.metrics["training/rollout_probs_diff_mean"] = float((gap * weight).sum())
            self.metrics["training/rollout_probs_diff_max"] = float(gap.max()) if len(gap) else 0.0
        return logprobs

    def ref_logprobs(self, batch: Batch) -> Tensor:
        """Log-probs of the response tokens under the reference policy, float32 [T]."""
        self._sleep_engine()
        with self.timed("ref"), self._bar("ref", len(batch)) as bar, self.trainer.reference_weights():
            return self.trainer.logprobs(batch, self._plans(batch), progress=bar)[0]

    # Updates ----------------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, loss: Loss) -> None:
        """training.epochs passes over the mini-batches, an optimizer step each."""
        self._sleep_engine()
        if batch.advantages is not None:
            self.metrics |= _spread("critic/advantages", batch.advantages[batch.mask > 0])
            self.metrics |= _spread("critic/rewards", batch.rewards)
        lr = learning_rate(self.config.training.optimizer, self.step, self.config.run.max_steps)
        plans, sums, updates = self._plans(batch), {}, 0
        with self.timed("update_actor"), self._bar("train", len(batch) * self.config.training.epochs) as bar:
            for _ in range(self.config.training.epochs):
                for plan in plans:
                    totals = _totals(batch, plan)
                    terms = self.trainer.update(batch, plan, lambda m, totals=totals: loss(m, totals), lr=lr, progress=bar)
                    updates += 1
                    for name, value in terms.items():
                        sums[name] = sums.get(name, 0.0) + value
        self._updates += updates
        self.num_tokens += int(batch.prompt_lengths.sum() + batch.lengths.sum())
        means = {name: value / updates for name, value in sums.items()}
        self.metrics |= {name if "/" in name else f"actor/{name}": value for name, value in means.items()}
        self.metrics["actor/lr"] = lr

    # Turns of the two engines -----------------------------------------------------------------------------------------

    def _wake_engine(self) -> None:
        if not self._engine_awake:
            self.engine.wake_weights()
        stale = self._engine_has_weights_of != self._updates or (self.device.is_cuda and not self._engine_awake)
        if stale:
            with self.timed("update_weights"):
                refit(self.trainer, self.engine)
                self._engine_has_weights_of = self._updates
                self._num_refits += 1
                every = self.config.refit.check_every
                if self._num_refits == 1 or (every and self.step % every == 0):
                    check_refit(self.trainer, self.engine)
        if not self._engine_awake:
            self.engine.wake_cache()
        self._engine_awake = True

    def _sleep_engine(self) -> None:
        if self.engine is not None and self._engine_awake:
            self.engine.sleep()
            self._engine_awake = False

    # Micro-batches ----------------------------------------------------------------------------------------------------

    def _plans(self, batch: Batch) -> list[list[MicroBatches]]:
        """The micro-batches of each mini-batch; made once for a batch, so that every pass packs alike."""
        if batch.plans is None:
            per_minibatch = self.config.training.prompts_per_minibatch or self.config.data.prompts_per_step
            minibatch_of = torch.div(batch.groups, per_minibatch, rounding_mode="floor")
            batch.plans = [
                self.trainer.plan(batch, (minibatch_of == k).nonzero().squeeze(1).tolist())
                for k in range(int(minibatch_of.max()) + 1)
            ]
        return batch.plans

    def _bar(self, name: str, total: int):
        return self.progress.phase(f"step {self.step} {name}", total, "samples")


def train_sampling(config: Config) -> Sampling:
    """Sampling of training batches."""
    rollout = config.rollout
    return Sampling(
        samples_per_prompt=rollout.samples_per_prompt,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_tokens=rollout.max_response_tokens,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def _totals(batch: Batch, plan: list[MicroBatches]) -> Totals:
    samples = sorted(i for rank in plan for micro in rank for i in micro)
    offsets = batch.offsets
    tokens = sum(float(batch.mask[offsets[i] : offsets[i + 1]].sum()) for i in samples)
    return Totals(num_tokens=max(tokens, 1.0), num_samples=float(len(samples)))


def _reward_sample(prompt: Prompt, response: str) -> dict:
    return dict(
        prompt=prompt.text,
        response=response,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
    )


def _columns_of(results: list[dict], mine: list[int], total: int, device: Device) -> dict[str, Tensor]:
    """Every rank's scores as columns float32 [N] on every rank; NaN where a sample lacks a number. Collective."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted({name for result in results for name in result}))
    names = sorted({name for rank_names in everyone for name in rank_names})
    table = torch.zeros(len(names), total, dtype=torch.float64)
    for i, result in zip(mine, results):
        table[:, i] = torch.tensor([result.get(name, float("nan")) for name in names], dtype=torch.float64)
    return dict(zip(names, sum_over_world(table, device.torch).float()))


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}


def _length_metrics(batch: Batch) -> dict[str, float]:
    clipped = {"response_length/clip_ratio": float(batch.truncated.float().mean())}
    lengths, prompt_lengths = batch.lengths.float(), batch.prompt_lengths.float()
    return _spread("response_length", lengths) | _spread("prompt_length", prompt_lengths) | clipped
