"""The scoring phase: scores and rewards of responses.

For example, a score of 1 with an overlong penalty of 0.5 is a reward of 0.5.
"""

from collections import Counter

from torch import Tensor

from rl.checks.batches import warn_of_constant_scores
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.phases.batch_metrics import score_metrics
from rl.phases.reward_shaping import overlong_penalty
from rl.phases.scorer import Scorer
from rl.phases.step_record import StepRecord


class Scoring:
    """Fills the scores and rewards of a batch. Methods are collective over the world.

    Args:
        scorer: the scorer of the samples; None if the run has no reward.
    """

    def __init__(
        self, config: Config, step: StepRecord, engines: Engines, memory: MemorySharing, scorer: Scorer | None
    ):
        self._config, self._step, self._engines, self._memory = config, step, engines, memory
        self._scorer = scorer
        self._groups: Counter[float | str] = Counter()
        """Number of groups so far by score (`warn_of_constant_scores`)."""

    def warning(self) -> str:
        """Return `Scorer.warning`; "" for a run without a reward."""
        return "" if self._scorer is None else self._scorer.warning()

    def fill_scores(self, batch: Batch, *, timing: str, predictions: bool = False) -> list[str | None] | None:
        """Fill `scores`, `rewards` (equal to `scores`) and `score_details`.

        timing: the duration is logged as timing_s/<timing>. With `predictions`, returns the answer that the
        reward function found in each response; an entry is None where the function reports no answer.
        """
        assert self._scorer is not None, "this run has no reward"
        if self._scorer.has_models:
            self._memory.to_training()
        with self._step.phase("score", timing=timing, batch=batch.hashes()):
            columns, answers = self._scorer.score(
                batch, predictions=predictions, is_validation=timing == "testing"
            )
        batch.scores = columns.pop("score")
        batch.rewards = batch.scores.clone()
        batch.score_details = columns
        self._scorer.grades.check(batch, answers)
        if batch.digests is not None:
            batch.score_digests = batch.hash_scores(batch.digests)
        return answers

    def score_samples(self, batch: Batch) -> None:
        """Fill and log `scores`, `rewards` (scores minus the overlong penalty) and `score_details`."""
        self.fill_scores(batch, timing="reward")
        if self._config.reward.overlong_buffer_tokens:
            penalties = overlong_penalty(batch, self._config)
            batch.rewards = batch.column("rewards") + penalties
            self._step.metrics["reward/overlong_penalty/mean"] = float(penalties.mean())
        self._step.metrics |= score_metrics(batch.merge_rows())
        if warning := warn_of_constant_scores(batch, self._groups):
            self._step.progress.line(warning)

    def greedy_rewards(self, batch: Batch) -> Tensor:
        """Return and log the rewards of a batch with one response per prompt, float32 [prompts]."""
        self.fill_scores(batch, timing="reward")
        rewards = batch.column("rewards")
        if self._config.reward.overlong_buffer_tokens:
            batch.rewards = rewards = rewards + overlong_penalty(batch, self._config)
        self._step.metrics["critic/baseline/mean"] = float(rewards.mean())
        return rewards
