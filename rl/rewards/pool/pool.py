"""Score samples in worker processes, so that no reward function can block or end the training process.

    with ScoringPool(plan, failure_score=0.0, workers=8, timeout_s=10, memory_mib=4096) as pool:
        pool.check()                     # ValueError if the functions cannot be loaded
        scores = pool.score(samples)     # list[Score], in order

Samples are sent in chunks and results return one by one, so each call has its own time limit and a failure is
assigned to one call. A worker that is late, dead or sends invalid messages is killed together with every
process it started (see worker.py); its sample gets the failure score and a new worker continues the chunk.

The workers run as the same user in the same file system: this protects against accidents, not attacks.
Programs that a model wrote belong in `rl.sandbox`.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.config.reward import Reward
from rl.config.reward_sources import RewardPlan
from rl.rewards.pool.worker_process import ScoringWorker
from rl.rewards.score import Score
from rl.workers.messages import too_slow
from rl.workers.pool import START_ATTEMPTS, Pool

log = logging.getLogger(__name__)

CHUNK_SAMPLES = 64
"""Maximum number of samples in a chunk, and so of concurrent async calls in one worker."""
SAY_AFTER_S = 10.0
"""Seconds without an answer after which a call is logged; the interval of the lines of progress."""
SWEEP_EVERY_S = 1.0
"""Seconds between searches for orphaned processes of a busy worker; each search reads all of /proc."""

_logged: set[str] = set()
"""Failures that this process has logged; each is logged in full only once."""


def default_workers(local_world_size: int) -> int:
    """Return the number of workers of one rank: its share of the cores that this process may use, at least 1.

    Call it before an engine pins the main thread to a core.
    """
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def scoring_pool(plan: RewardPlan, reward: Reward, *, local_world_size: int) -> "ScoringPool":
    """Return the pool that the section `reward` asks for. local_world_size: ranks that share the cores."""
    if reward.in_process:
        from rl.rewards.pool.in_process import InProcessPool

        return InProcessPool(plan)
    return ScoringPool(
        plan,
        failure_score=reward.failure_score,
        timeout_s=reward.timeout_s,
        workers=reward.workers or default_workers(local_world_size),
        memory_mib=reward.memory_mib,
        variables=reward.variables,
    )


class ScoringPool(Pool[ScoringWorker]):
    """Worker processes that call a plan's reward functions."""

    module = "rl.rewards.pool.worker"
    worker_class = ScoringWorker

    def __init__(self, plan: RewardPlan, *, failure_score: float, timeout_s: float, **limits: Any):
        """Store the limits, see `Pool`. timeout_s: time limit of each call, in seconds."""
        super().__init__(plan, {"timeout_s": timeout_s}, **limits)
        self.name = plan.name
        """Name of the reward function, for messages."""
        self._failure_score, self._timeout_s = float(failure_score), timeout_s
        self._jobs = _Jobs(0)
        self._warned_at = 0.0
        self.failures: dict[int, str] = {}
        """Reason of each failed call of the last `score`, by sample, as one sentence."""
        self._first = ""
        self.on_answer: Callable[[int, float], None] | None = None
        """Called after each answer with the worker's number, and time.monotonic() of the answer before."""

    def score(self, samples: Sequence[Mapping[str, Any]], *, logs: bool = True) -> list[Score]:
        """Return one Score per sample, in order, with `score`, `failed` and the function's other values.

        A sample gets {"score": failure_score, "failed": 1.0} if its call raises, exceeds the time limit, ends
        its process or returns no finite score. With `logs` failures are logged at once (`log_failures`). No
        exception of a reward function is raised.

        If a worker dies or blocks during concurrent async calls, these are repeated in ever smaller groups
        until the failing call is isolated.
        """
        jobs = self._jobs = _Jobs(len(samples))
        self.failed_starts = 0
        try:
            for worker in list(self.all):
                self.read(worker)  # detects workers that died while idle
            while jobs.unfinished:
                self._start_workers()
                for worker in self.all:
                    if worker.is_free and jobs.has_work:
                        chunk = jobs.take(self.max_workers, worker.ready)
                        worker.assign(chunk, samples, self._timeout_s)
                self.await_events(SAY_AFTER_S if self.all else 0.0)
                self._say_slow()
        except BaseException:
            self.shutdown()  # pending results would be taken for answers of the next call
            raise
        for worker in self.all:
            worker.request_sweep()
        self.reap(wait=False)
        scores = self._to_scores(jobs)
        if logs:
            self.log_failures()
        return scores

    # ---- workers ----

    def _start_workers(self) -> None:
        """Start the workers that the unassigned work can use; fail the work if none starts."""
        jobs = self._jobs
        while len(self.all) < min(self.max_workers, jobs.unfinished) and jobs.has_work:
            if self.failed_starts >= START_ATTEMPTS:
                break
            self.start()
        if self.failed_starts >= START_ATTEMPTS and not any(worker.is_ready for worker in self.all):
            jobs.fail_rest(self.start_details)
            for worker in list(self.all):
                self.dismiss(worker)

    def received(self, worker: ScoringWorker, message: dict[str, Any]) -> None:
        """Record a message about a sample."""
        jobs, index = self._jobs, message["i"]
        if message.get("waiting"):
            worker.awaited.add(index)
        else:
            del worker.chunk[index]
            if self.on_answer is not None:
                self.on_answer(self.all.index(worker), worker.since)
            worker.since = time.monotonic()
            error = message.get("error")
            texts = message.get("prediction"), message.get("feedback")
            if isinstance(error, str):
                jobs.finish(index, error)
            else:
                seal, *parts = message["of"]
                jobs.finish(index, Score(message["values"], *texts, seal, tuple(parts)))
        worker.set_deadline(self._timeout_s)
        if message.get("last"):
            jobs.give_back(list(worker.chunk))
            worker.chunk.clear()
            self.dismiss(worker)
        elif not worker.chunk and time.monotonic() - worker.swept_at > SWEEP_EVERY_S:
            worker.request_sweep()

    def _say_slow(self) -> None:
        """Log a call without an answer for SAY_AFTER_S, at most one in that time."""
        now, left = time.monotonic(), self._jobs.unfinished
        since = min((worker.since for worker in self.all if worker.chunk), default=now)
        if left and now - max(since, self._warned_at) >= SAY_AFTER_S:
            self._warned_at = now
            log.warning(
                "a call of the reward function has no answer after %.0f s (reward.timeout_s=%g ends it); "
                "%d of %d samples are scored",
                *(now - since, self._timeout_s, len(self._jobs.outcomes) - left, len(self._jobs.outcomes)),
            )

    def lateness(self, worker: ScoringWorker) -> str:
        return too_slow(self._timeout_s) + ", and its process was killed"

    def gave_up(self, worker: ScoringWorker, reason: str) -> None:
        """Fail the sample that a worker was processing, and give back its others."""
        jobs, left = self._jobs, list(worker.chunk)
        if not left:
            return
        # Calls are made in order, and the event loop runs after the last of them.
        current = next((i for i in left if i not in worker.awaited), left[0] if len(left) == 1 else None)
        if current is not None and worker.was_killed and current not in jobs.retried:
            # An earlier call or another process may have killed the worker, so the call is tried once more.
            jobs.retried.add(current)
            jobs.give_back(left)
        elif current is not None:
            jobs.finish(current, reason)
            jobs.give_back([i for i in left if i != current])
        else:  # any of the awaited calls may have failed: retry them in two halves
            jobs.give_back(left[len(left) // 2 :])
            jobs.give_back(left[: len(left) // 2])

    def log_failures(self) -> None:
        """Log the number of failures of the last `score`, and the first one with its traceback.

        The same failure is described once per process.
        """
        if not self.failures:
            return
        log.warning(
            "%s failed on %d of %d samples, which get the score %g; the first failure%s",
            self.name,
            len(self.failures),
            len(self._jobs.outcomes),
            self._failure_score,
            " was logged before" if self._first in _logged else ":\n" + self._first,
        )
        _logged.add(self._first)

    def _to_scores(self, jobs: "_Jobs") -> list[Score]:
        failures = {i: outcome for i, outcome in enumerate(jobs.outcomes) if isinstance(outcome, str)}
        self.failures = {i: reason.partition("\n")[0] for i, reason in failures.items()}
        self._first = next(iter(failures.values()), "")
        outcomes = [outcome for outcome in jobs.outcomes if outcome is not None]
        assert len(outcomes) == len(jobs.outcomes), "every sample has been answered"
        return [
            Score({"score": self._failure_score, "failed": 1.0})
            if isinstance(outcome, str)
            else replace(outcome, values={**outcome.values, "failed": 0.0})
            for outcome in outcomes
        ]


class _Jobs:
    """The samples of one call of `score`, by index: unassigned work and outcomes."""

    def __init__(self, num_samples: int):
        self.outcomes: list[Score | str | None] = [None] * num_samples
        """A score, or the reason of a failure."""
        self.unfinished = num_samples
        self.retried: set[int] = set()
        """Samples that are repeated because their worker was killed, possibly not by their call."""
        self._next = 0
        self._given_back: deque[list[int]] = deque()

    @property
    def has_work(self) -> bool:
        return self._next < len(self.outcomes) or bool(self._given_back)

    def take(self, num_workers: int, is_async: bool) -> list[int]:
        """Return the next chunk of indices.

        Chunks of synchronous calls shrink towards the end, so that no worker is left with slow samples while
        others are idle (guided self-scheduling, Polychronopoulos and Kuck 1987). For example, 4 workers take
        512 samples in chunks of 32, 30, 29 and so on.
        """
        if self._given_back:
            return self._given_back.popleft()
        share = math.ceil((len(self.outcomes) - self._next) / (num_workers * (1 if is_async else 4)))
        start, self._next = self._next, min(self._next + min(share, CHUNK_SAMPLES), len(self.outcomes))
        return list(range(start, self._next))

    def give_back(self, indices: list[int]) -> None:
        if indices:
            self._given_back.appendleft(indices)

    def finish(self, index: int, outcome: Score | str) -> None:
        self.outcomes[index] = outcome
        self.unfinished -= 1

    def fail_rest(self, reason: str) -> None:
        """Fail all unassigned samples, because no worker starts."""
        while self.has_work:
            for index in self.take(1, is_async=True):
                self.finish(index, reason)
