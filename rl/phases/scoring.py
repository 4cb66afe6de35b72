"""The scoring phase: what each response is worth, logged and written down for people to read."""

from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.phases.batch_metrics import score_metrics
from rl.phases.reward_shaping import overlong_penalty
from rl.phases.scorer import Scorer
from rl.phases.step import Step
from rl.rollout.turns import SOURCES
from rl.run_directory.samples import FILE_NAME, append_samples


class Scoring:
    """Fills the scores and rewards of a batch. Methods are collective over the world.

    Args:
        scorer: None: this run has no reward.
        tokenizer: the policy's, to decode the samples written to samples.jsonl.
    """

    def __init__(
        self,
        config: Config,
        step: Step,
        engines: Engines,
        memory: MemorySharing,
        scorer: Scorer | None,
        tokenizer,
    ):
        self._config, self._step, self._engines, self._memory = config, step, engines, memory
        self._scorer, self._tokenizer = scorer, tokenizer
        self._written_step = -1

    def fill_scores(self, batch: Batch, *, timing: str, predictions: bool = False) -> list[str | None] | None:
        """Fill `scores`, `rewards` (equal to them) and `score_details`.

        timing: seconds are logged as timing_s/<timing>. With `predictions`, returns the answer that the
        reward function found in each response, None where it reports none.
        """
        assert self._scorer is not None, "this run has no reward"
        if self._engines.reward_model is not None or self._engines.judge is not None:
            self._memory.to_training()
        with self._step.phase("score", timing=timing, batch=batch.fingerprint):
            columns, answers = self._scorer.score(batch, predictions=predictions)
        batch.scores = columns.pop("score")
        batch.rewards = batch.scores.clone()
        batch.score_details = columns
        return answers

    def score_samples(self, batch: Batch) -> None:
        """Fill and log `scores`, `rewards` (scores minus the overlong penalty) and `score_details`."""
        self.fill_scores(batch, timing="reward")
        if self._config.reward.overlong_buffer_tokens:
            penalties = overlong_penalty(batch, self._config)
            batch.rewards = batch.rewards + penalties
            self._step.metrics["reward/overlong_penalty/mean"] = float(penalties.mean())
        self._step.metrics |= score_metrics(batch.merge_rows())
        self._write_samples(batch)

    def greedy_rewards(self, batch: Batch) -> Tensor:
        """Return and log the rewards of a batch with one response per prompt, float32 [prompts]."""
        self.fill_scores(batch, timing="reward")
        if self._config.reward.overlong_buffer_tokens:
            batch.rewards = batch.rewards + overlong_penalty(batch, self._config)
        self._step.metrics["critic/baseline/mean"] = float(batch.rewards.mean())
        return batch.rewards

    def _write_samples(self, batch: Batch) -> None:
        """Write the first logging.samples samples of the step; only rank 0, once per step."""
        count, number = min(self._config.logging.samples, len(batch)), self._step.number
        if dist.get_rank() > 0 or not count or self._written_step == number:
            return
        self._written_step = number
        rows = [
            {
                "training/global_step": number,
                "prompt": batch.prompts[int(batch.groups[i])].text,
                "response": self._tokenizer.decode(batch.response_ids[i]),
                "ground_truth": batch.prompts[int(batch.groups[i])].ground_truth,
                "score": float(batch.scores[i]),
            }
            | self._conversation(batch, i)
            for i in range(count)
        ]
        append_samples(Path(self._config.run.dir, FILE_NAME), rows)

    def _conversation(self, batch: Batch, sample: int) -> dict:
        """Return the texts of a trajectory by role, with all tokens between them; {} without environments."""
        if batch.turns is None:
            return {}
        turns = batch.turns[batch.offsets[sample] : batch.offsets[sample + 1]].numpy()
        parts = np.split(batch.response_ids[sample], np.flatnonzero(np.diff(turns)) + 1)
        starts = np.cumsum([0, *map(len, parts[:-1])])
        roles = [
            "assistant" if turns[start] > 0 else SOURCES[-turns[start]] for start in starts if len(turns)
        ]
        texts = [batch.prompt_ids[sample], *parts]
        decode = self._tokenizer.decode
        pairs = zip(["prompt", *roles], texts)
        return {"messages": [{"role": role, "content": decode(ids)} for role, ids in pairs]}
