"""Scores samples in worker processes, so that no reward function can hang, fill or end the training process.

    with ScoringPool(plan, failure_score=0.0, workers=default_workers(8), timeout_s=10, memory_mib=4096) as pool:
        pool.check()                     # ValueError if the functions cannot be loaded
        scores = pool.score(samples)     # list[Score], in order

Samples go out in chunks, results come back one by one, which gives every call a limit of its own and tells which call a worker
died in. A worker that is late, dead or talks rubbish is killed with all that it started (see worker.py), its sample gets the
failure score, and a new worker takes over the rest of the chunk.

What this does not do: the workers run as the same user in the same file system. It holds off accidents, not attacks; programs
that a model wrote belong into a sandbox.
"""

import logging
import math
import os
import pickle
import select
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rl.config.reward_sources import RewardPlan
from rl.rewards.pool.worker_process import WorkerProcess
from rl.rewards.score import Score

log = logging.getLogger(__name__)

CHUNK_SAMPLES = 64
"""Most samples sent at a time, and so most calls of an async function that one worker has open."""
START_ATTEMPTS = 3
"""Workers that may die one after the other before they are ready."""
SWEEP_EVERY_S = 1.0
"""Between the looks for stray processes of a busy worker; each reads all of /proc."""

_said: set[str] = set()
"""Failures that this process has logged: a function that fails in every step need not say why in every step."""


def default_workers(local_world_size: int) -> int:
    """Workers of one rank: its share of the cores that this process may use, at least 1.

    Ask before an engine pins the main thread to a core.
    """
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


class ScoringPool:
    """Worker processes that call a plan's reward functions. For one thread; starts nothing before the first call."""

    def __init__(
        self,
        plan: RewardPlan,
        *,
        failure_score: float,
        workers: int,
        timeout_s: float,
        memory_mib: int,
        startup_s: float = 120.0,
    ):
        """`timeout_s` limits each call of a sample, `startup_s` the import of the functions, which does not count as a call.
        `memory_mib` limits the address space of a worker and of each process it starts; 0 is no limit. Relative paths in the
        plan are looked up from the present working directory. Raises ValueError for numbers out of range.
        """
        if workers < 1:
            raise ValueError(
                f"a scoring pool has at least 1 worker, not {workers}; default_workers says how many suit the host."
            )
        if not 0 < timeout_s < math.inf or not 0 < startup_s < math.inf:
            raise ValueError(
                f"timeout_s={timeout_s} and startup_s={startup_s} must be finite and greater than 0 seconds."
            )
        if memory_mib < 0:
            raise ValueError(f"memory_mib is {memory_mib}, but must be 0 (no limit) or more.")
        self._failure_score, self._num_workers = float(failure_score), workers
        self._timeout_s, self._startup_s = timeout_s, startup_s
        # Workers are started by the thread that scores, which an engine may have pinned to one core by then.
        cpus = sorted(os.sched_getaffinity(0))
        self._options = {"memory_mib": memory_mib, "timeout_s": timeout_s, "cpus": cpus}
        self._cwd = os.getcwd()
        self._greeting = pickle.dumps((plan, list(sys.path)))
        self._poller = select.poll()
        self._by_fd: dict[int, WorkerProcess] = {}
        self._workers: list[WorkerProcess] = []
        self._leaving: list[WorkerProcess] = []

    def score(self, samples: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One Score for each sample, in order; `values` has `score`, `failed` and what else the function returned.

        A sample whose call raises, takes longer than the limit, ends its process or returns no finite score gets
        {"score": failure_score, "failed": 1.0}. The first failure is logged as a warning, with their number; the same failure
        once per process. Raises nothing that comes from a reward function.

        Async calls that a blocked or dead worker had open are made again, fewer at a time, until the guilty one is alone.
        """
        batch = _Batch(len(samples))
        try:
            for worker in list(self._workers):
                self._attend(worker, batch)  # who has died while idle must not cost a sample
            while batch.unfinished:
                self._start_workers(batch)
                for worker in self._workers:
                    if worker.is_free and batch.has_work:
                        worker.assign(
                            batch.take(self._num_workers, worker.is_async), samples, self._timeout_s
                        )
                self._await_events(batch)
        except BaseException:
            self.close()  # what the workers still have would be taken for answers of the next call
            raise
        for worker in self._workers:
            worker.ask_to_sweep()
        self._bury(wait=False)
        return self._to_scores(batch)

    def check(self) -> None:
        """Raise ValueError if the reward functions cannot be loaded in a worker. Starts the first worker."""
        batch = _Batch(0)
        while not any(worker.is_ready for worker in self._workers):
            if not self._workers:
                self._start_worker(batch)
            self._await_events(batch)
            if batch.failed_starts >= START_ATTEMPTS:
                raise ValueError(batch.start_failure)

    def close(self) -> None:
        """End the workers and all that they started. A later `score` starts new ones."""
        for worker in list(self._workers):
            self._dismiss(worker)
        self._bury(wait=True)

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Workers ----------------------------------------------------------------------------------------------------------

    def _start_workers(self, batch: "_Batch") -> None:
        """As many as the work that nobody has can use. Where none will start and none is left, that work fails."""
        while len(self._workers) < min(self._num_workers, batch.unfinished) and batch.has_work:
            if batch.failed_starts >= START_ATTEMPTS:
                break
            self._start_worker(batch)
        if batch.failed_starts >= START_ATTEMPTS and not any(worker.is_ready for worker in self._workers):
            batch.fail_rest()
            for worker in list(self._workers):
                self._dismiss(worker)

    def _start_worker(self, batch: "_Batch") -> None:
        try:
            worker = WorkerProcess(self._greeting, self._options, self._cwd, self._startup_s)
        except OSError as error:  # no more processes, memory or files
            return batch.note_failed_start(f"a scoring worker cannot be started: {error}")
        self._workers.append(worker)
        for fd in worker.fds:
            self._by_fd[fd] = worker
            self._poller.register(fd, select.POLLIN)

    def _dismiss(self, worker: WorkerProcess) -> None:
        for fd in worker.fds:
            self._forget(fd)
        self._workers.remove(worker)
        self._leaving.append(worker)
        worker.leave()

    def _forget(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def _bury(self, *, wait: bool) -> None:
        """Reap the workers that have left."""
        self._leaving = [
            worker for worker in self._leaving if not worker.is_gone(wait=wait or worker.was_killed)
        ]

    def _await_events(self, batch: "_Batch") -> None:
        """Until a worker says something or is late, and what follows from it."""
        for worker in self._workers:
            if worker.hung_up:
                self._forget(worker.fds[0])  # its end would wake us all the time
            elif worker.wants_pollout():
                self._poller.modify(worker.fds[0], select.POLLIN | (select.POLLOUT if worker.outgoing else 0))
        wait_s = min(worker.deadline for worker in self._workers) - time.monotonic() if self._workers else 0.0
        wait_ms = None if wait_s == math.inf else math.ceil(max(wait_s, 0.0) * 1000)
        events = self._poller.poll(wait_ms)
        for fd, event in events:
            if (worker := self._by_fd.get(fd)) is not None:  # else it was dismissed a moment ago
                if event & select.POLLOUT:
                    worker.flush()
                self._attend(worker, batch)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            if worker in self._workers:  # a failed start dismisses all that are starting
                self._attend(worker, batch)  # it may have answered while this process was held up
            if worker in self._workers and worker.deadline <= now:
                self._replace(worker, batch, worker.lateness(self._timeout_s))

    def _attend(self, worker: WorkerProcess, batch: "_Batch") -> None:
        """Take what it has to say."""
        for message in worker.receive():
            if "i" in message:
                self._take_answer(worker, batch, message)
            elif "ready" in message:
                batch.failed_starts = 0
            elif "unloadable" in message:
                batch.note_failed_start(message["unloadable"], message["traceback"], again=False)
                return self._dismiss(worker)
            if worker not in self._workers:
                return
        if worker.lost:
            self._replace(worker, batch, worker.lost)

    def _take_answer(self, worker: WorkerProcess, batch: "_Batch", message: dict[str, Any]) -> None:
        """A message about a sample, which `receive` has found to be in order."""
        if message.get("waiting"):
            worker.awaited.add(message["i"])
        else:
            del worker.chunk[message["i"]]
            outcome = (
                message["error"] if "error" in message else Score(message["values"], message["prediction"])
            )
            batch.settle(message["i"], outcome)
        worker.set_deadline(self._timeout_s)
        if message.get("last"):
            batch.give_back(list(worker.chunk))
            worker.chunk.clear()
            self._dismiss(worker)
        elif not worker.chunk and time.monotonic() - worker.swept_at > SWEEP_EVERY_S:
            worker.ask_to_sweep()

    def _replace(self, worker: WorkerProcess, batch: "_Batch", reason: str) -> None:
        """Dismiss a worker that is late, dead or talks rubbish; fail the sample it was at, give back the others."""
        self._dismiss(worker)
        self._bury(wait=False)
        if not worker.is_ready:
            return batch.note_failed_start(
                reason, again=bool(worker.lost)
            )  # not if it was late: that takes minutes
        left = list(worker.chunk)
        # Calls are made in order, and the event loop runs after the last of them.
        at = next((i for i in left if i not in worker.awaited), left[0] if len(left) == 1 else None)
        if at is not None and worker.was_killed and at not in batch.tried_again:
            batch.tried_again.add(
                at
            )  # by a call before it, or from outside; a call that does it will do it again
            batch.give_back(left)
        elif at is not None:
            batch.settle(at, reason)
            batch.give_back([i for i in left if i != at])
        else:  # any of the open calls; so half of them at a time
            batch.give_back(left[len(left) // 2 :])
            batch.give_back(left[: len(left) // 2])

    def _to_scores(self, batch: "_Batch") -> list[Score]:
        failures = [outcome for outcome in batch.outcomes if isinstance(outcome, str)]
        if failures:
            first = failures[0]
            details = (
                "the first failure:\n" + first
                if first not in _said
                else "the first failure was logged before"
            )
            _said.add(first)
            log.warning(
                "the reward function failed on %d of %d samples, which get the score %g; %s",
                len(failures),
                len(batch.outcomes),
                self._failure_score,
                details,
            )
        return [
            Score({"score": self._failure_score, "failed": 1.0})
            if isinstance(outcome, str)
            else Score({**outcome.values, "failed": 0.0}, outcome.prediction)
            for outcome in batch.outcomes
        ]


class _Batch:
    """The samples of one call of `score`, by index: what is to do, and what came of it."""

    def __init__(self, num_samples: int):
        self.outcomes: list[Score | str | None] = [None] * num_samples
        """A score, or why there is none."""
        self.unfinished = num_samples
        self.failed_starts = 0
        """Workers that have died, one after the other, before they were ready; START_ATTEMPTS if it is no use to try again."""
        self.start_failure = ""
        """Why the last of them did, in a sentence."""
        self._start_details = ""
        self.tried_again: set[int] = set()
        """Samples that a worker had when it was killed, not necessarily by their call."""
        self._next = 0
        self._given_back: deque[list[int]] = deque()

    @property
    def has_work(self) -> bool:
        return self._next < len(self.outcomes) or bool(self._given_back)

    def take(self, num_workers: int, is_async: bool) -> list[int]:
        """The next chunk. Small towards the end, so that no worker sits on slow samples while others are idle (guided
        self-scheduling, Polychronopoulos and Kuck 1987); of async calls as many at a time as there may be."""
        if self._given_back:
            return self._given_back.popleft()
        share = math.ceil((len(self.outcomes) - self._next) / (num_workers * (1 if is_async else 4)))
        start, self._next = self._next, min(self._next + min(share, CHUNK_SAMPLES), len(self.outcomes))
        return list(range(start, self._next))

    def give_back(self, indices: list[int]) -> None:
        if indices:
            self._given_back.appendleft(indices)

    def settle(self, index: int, outcome: Score | str) -> None:
        self.outcomes[index] = outcome
        self.unfinished -= 1

    def note_failed_start(self, sentence: str, details: str = "", *, again: bool = True) -> None:
        self.start_failure, self._start_details = sentence, details or sentence
        self.failed_starts = self.failed_starts + 1 if again else START_ATTEMPTS

    def fail_rest(self) -> None:
        """All that no worker has, because no worker starts."""
        while self.has_work:
            for index in self.take(1, is_async=True):
                self.settle(index, self._start_details)
