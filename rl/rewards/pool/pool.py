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
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.config.reward_sources import RewardPlan
from rl.rewards.pool.worker_process import ScoringWorker
from rl.rewards.score import Score
from rl.workers.process import Workers

log = logging.getLogger(__name__)

CHUNK_SAMPLES = 64
"""Largest number of samples in a chunk, and so of concurrent async calls in one worker."""
START_ATTEMPTS = 3
"""Number of consecutive workers that may die before they are ready."""
SWEEP_EVERY_S = 1.0
"""Seconds between searches for orphaned processes of a busy worker; each search reads all of /proc."""

_logged: set[str] = set()
"""Failures that this process has logged; each is logged in full only once."""


def default_workers(local_world_size: int) -> int:
    """Return the number of workers of one rank: its share of the cores that this process may use, at least 1.

    Call it before an engine pins the main thread to a core.
    """
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


class ScoringPool:
    """Worker processes that call a plan's reward functions. Not thread-safe; started by the first call."""

    def __init__(
        self,
        plan: RewardPlan,
        *,
        failure_score: float,
        workers: int,
        timeout_s: float,
        memory_mib: int,
        startup_s: float = 120.0,
        variables: Sequence[str] = (),
    ):
        """Check the limits; relative paths in the plan are resolved against the current working directory.

        Args:
            timeout_s: limit of each call, in seconds.
            startup_s: limit of a worker's start, the import of the functions included, in seconds.
            memory_mib: address space of a worker and of each process it starts; 0 for no limit.
            variables: see `WorkerProcess`.

        Raises ValueError for numbers out of range.
        """
        if workers < 1:
            raise ValueError(f"workers={workers}: a scoring pool needs at least 1.")
        if not 0 < timeout_s < math.inf or not 0 < startup_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s} and startup_s={startup_s} must be finite and above 0.")
        if memory_mib < 0:
            raise ValueError(f"memory_mib={memory_mib} must be 0 (no limit) or more.")
        self._failure_score, self._num_workers = float(failure_score), workers
        self._timeout_s, self._startup_s = timeout_s, startup_s
        # Passed to the workers because an engine may pin the scoring thread to one core before they start.
        cpus = sorted(os.sched_getaffinity(0))
        self._options = {"memory_mib": memory_mib, "timeout_s": timeout_s, "cpus": cpus}
        self._cwd, self._variables = os.getcwd(), variables
        self._initialization = pickle.dumps((plan, list(sys.path)))
        self._workers: Workers[ScoringWorker] = Workers()
        self.on_answer: Callable[[int, float], None] | None = None
        """Called after each answer with the worker's number, and time.monotonic() of the answer before."""

    def score(self, samples: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Return one Score per sample, in order, with `score`, `failed` and the function's other values.

        A sample whose call raises, exceeds the time limit, ends its process or returns no finite score gets
        {"score": failure_score, "failed": 1.0}. The number of failures and the first one are logged as a
        warning; the same failure is described once per process. No exception of a reward function is raised.

        If a worker dies or blocks during concurrent async calls, these are repeated in ever smaller groups
        until the failing call is isolated.
        """
        jobs = _Jobs(len(samples))
        try:
            for worker in list(self._workers.all):
                self._read(worker, jobs)  # detects workers that died while idle
            while jobs.unfinished:
                self._start_workers(jobs)
                for worker in self._workers.all:
                    if worker.is_free and jobs.has_work:
                        chunk = jobs.take(self._num_workers, worker.is_async)
                        worker.assign(chunk, samples, self._timeout_s)
                self._await_events(jobs)
        except BaseException:
            self.close()  # pending results would be taken for answers of the next call
            raise
        for worker in self._workers.all:
            worker.request_sweep()
        self._workers.reap(wait=False)
        return self._to_scores(jobs)

    def check(self) -> None:
        """Raise ValueError if the reward functions cannot be loaded in a worker. Starts the first worker."""
        jobs = _Jobs(0)
        while not any(worker.is_ready for worker in self._workers.all):
            if not self._workers.all:
                self._start_worker(jobs)
            self._await_events(jobs)
            if jobs.failed_starts >= START_ATTEMPTS:
                raise ValueError(jobs.start_failure)

    def close(self) -> None:
        """End the workers and every process they started. A later `score` starts new ones."""
        self._workers.close()

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- workers ----

    def _start_workers(self, jobs: "_Jobs") -> None:
        """Start the workers that the unassigned work can use; fail that work if there are none."""
        while len(self._workers.all) < min(self._num_workers, jobs.unfinished) and jobs.has_work:
            if jobs.failed_starts >= START_ATTEMPTS:
                break
            self._start_worker(jobs)
        if jobs.failed_starts >= START_ATTEMPTS and not any(worker.is_ready for worker in self._workers.all):
            jobs.fail_rest()
            for worker in list(self._workers.all):
                self._workers.dismiss(worker)

    def _start_worker(self, jobs: "_Jobs") -> None:
        try:
            worker = ScoringWorker(
                self._initialization,
                self._options,
                cwd=self._cwd,
                startup_s=self._startup_s,
                variables=self._variables,
            )
        except OSError as error:  # out of processes, memory or files
            return jobs.note_failed_start(f"a scoring worker cannot be started: {error}")
        self._workers.add(worker)

    def _await_events(self, jobs: "_Jobs") -> None:
        """Wait until a worker sends a message or is late, and process it."""
        self._workers.await_events(
            lambda worker: self._read(worker, jobs),
            lambda worker: self._replace(worker, jobs, worker.describe_lateness(self._timeout_s)),
            math.inf if self._workers.all else 0.0,
        )

    def _read(self, worker: ScoringWorker, jobs: "_Jobs") -> None:
        """Process the messages that a worker has sent."""
        for message in worker.receive():
            if "i" in message:
                self._record_answer(worker, jobs, message)
            elif "ready" in message:
                jobs.failed_starts = 0
            elif "unloadable" in message:
                jobs.note_failed_start(message["unloadable"], message["traceback"], retry=False)
                return self._workers.dismiss(worker)
            if worker not in self._workers.all:
                return
        if worker.lost:
            self._replace(worker, jobs, worker.lost)

    def _record_answer(self, worker: ScoringWorker, jobs: "_Jobs", message: dict[str, Any]) -> None:
        """Record a valid message about a sample."""
        index = message["i"]
        if message.get("waiting"):
            worker.awaited.add(index)
        else:
            del worker.chunk[index]
            if self.on_answer is not None:
                self.on_answer(self._workers.all.index(worker), worker.since)
            worker.since = time.monotonic()
            error = message.get("error")
            failed = isinstance(error, str)
            texts = message.get("prediction"), message.get("feedback")
            jobs.finish(index, error if failed else Score(message["values"], *texts, message["of"]))
        worker.set_deadline(self._timeout_s)
        if message.get("last"):
            jobs.give_back(list(worker.chunk))
            worker.chunk.clear()
            self._workers.dismiss(worker)
        elif not worker.chunk and time.monotonic() - worker.swept_at > SWEEP_EVERY_S:
            worker.request_sweep()

    def _replace(self, worker: ScoringWorker, jobs: "_Jobs", reason: str) -> None:
        """Dismiss a failed worker, fail the sample that it was processing, and give back the others."""
        self._workers.dismiss(worker)
        self._workers.reap(wait=False)
        if not worker.is_ready:  # a late start is not repeated, because it takes minutes
            return jobs.note_failed_start(reason, retry=bool(worker.lost))
        left = list(worker.chunk)
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

    def _to_scores(self, jobs: "_Jobs") -> list[Score]:
        failures = [outcome for outcome in jobs.outcomes if isinstance(outcome, str)]
        if failures:
            first = failures[0]
            log.warning(
                "the reward function failed on %d of %d samples, which get the score %g; the first failure%s",
                len(failures),
                len(jobs.outcomes),
                self._failure_score,
                " was logged before" if first in _logged else ":\n" + first,
            )
            _logged.add(first)
        return [
            Score({"score": self._failure_score, "failed": 1.0})
            if isinstance(outcome, str)
            else replace(outcome, values={**outcome.values, "failed": 0.0})
            for outcome in jobs.outcomes
        ]


class _Jobs:
    """The samples of one call of `score`, by index: unassigned work and outcomes."""

    def __init__(self, num_samples: int):
        self.outcomes: list[Score | str | None] = [None] * num_samples
        """A score, or the reason of a failure."""
        self.unfinished = num_samples
        self.failed_starts = 0
        """Number of consecutive workers that died before they were ready; START_ATTEMPTS for no retry."""
        self.start_failure = ""
        """Reason of the last failed start, in a sentence."""
        self._start_details = ""
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
        others are idle (guided self-scheduling, Polychronopoulos and Kuck 1987).
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

    def note_failed_start(self, sentence: str, details: str = "", *, retry: bool = True) -> None:
        self.start_failure, self._start_details = sentence, details or sentence
        self.failed_starts = self.failed_starts + 1 if retry else START_ATTEMPTS

    def fail_rest(self) -> None:
        """Fail all unassigned samples, because no worker starts."""
        while self.has_work:
            for index in self.take(1, is_async=True):
                self.finish(index, self._start_details)
