"""Score samples in the rank's own process, so that a debugger can stop in a reward function."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.config.reward_sources import RewardPlan
from rl.rewards.mixture import Mixture
from rl.rewards.pool.pool import ScoringPool
from rl.rewards.score import Score


class InProcessPool(ScoringPool):
    """Calls the reward functions one after another (`reward.in_process`), without limits and processes."""

    def __init__(self, plan: RewardPlan):
        super().__init__(plan, failure_score=0.0, timeout_s=0.0, workers=1, memory_mib=0)
        self._mixture = Mixture(plan)

    def check(self) -> bool:
        return self._mixture.is_async

    def score(self, samples: Sequence[Mapping[str, Any]], *, logs: bool = True) -> list[Score]:
        """Return one Score per sample, in order. An exception of a reward function ends the run."""
        found = [self._mixture.score(sample) for sample in samples]
        done = [each if isinstance(each, Score) else asyncio.run(_result(each)) for each in found]
        return [replace(each, values={**each.values, "failed": 0.0}) for each in done]


async def _result(outcome: Awaitable[Score]) -> Score:
    return await outcome
